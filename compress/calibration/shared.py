"""A block's calibration walk shared by several processes, on one machine or many, with the same bytes as one has.

Windows are dealt out in turns: each process sends its own through the block. What linear layers were given goes to all,
window by window in the text's order, and each layer's statistics are added up by one process, in that order: sums of
floats depend on it. So the forwards and the products are shared, and nothing is rounded otherwise.
"""

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from calib.moments import Moments, Wants
from compress.calibration.activations import Activations, Enough, Inputs, matmul_precision
from compress.calibration.carried import Call, Row
from compress.calibration.statistics import Collector
from compress.errors import UserError
from compress.model.block import Block
from compress.training.parallel import World

STATISTICS, FOLLOWING = "statistics", "following"
Seen = tuple[list[tuple[str, int]], list[Tensor]]  # (layer, which tensor) in the order of the calls, and the tensors


@dataclass(frozen=True)
class Order:
    """What process 0 has the others do: a walk of its windows through a block.

    kind   STATISTICS, of the layers in `wants`, or FOLLOWING: what goes into the next block.
    shape  (S, T, W) of the activations, which process 0 has; row: what a token's numbers are.
    """

    kind: str
    block: bytes
    call: Call
    row: Row
    wants: Mapping[str, Wants]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SharedInputs(Inputs):
    """What goes into a block, of process 0, with whom the others walk."""

    world: World = field(kw_only=True)

    def following(self, block: Block) -> Iterator[tuple[Row, Tensor]]:
        """See Inputs."""
        self.order(block, FOLLOWING, {})
        yield from _following(self, block, self.world)

    def order(self, block: Block, kind: str, wants: Mapping[str, Wants]) -> None:
        """Has the other processes begin."""
        pickled = pickle.dumps(block)
        self.world.share(Order(kind, pickled, self.call, self.row, dict(wants), self.activations.data.shape))


def collect_shared(collector: Collector, inputs: Inputs) -> None:
    """What linear layers are given goes into the collector: a statistics.Walk. Raises UserError as Collector.run."""
    if not isinstance(inputs, SharedInputs):
        collector.run(inputs)
        return
    inputs.order(collector.block, STATISTICS, collector.wants)
    _collect(inputs, collector.block, collector, inputs.world)


def follow(order: Order, world: World) -> None:
    """The part of a process other than 0 in what process 0 has ordered. Raises the UserErrors that it raises there."""
    block: Block = pickle.loads(order.block)
    # A product's bits may depend on where its factors lie: what was unpickled lies anywhere.
    for tensor in (*block.module.parameters(), *block.module.buffers()):
        tensor.data = tensor.data.clone()
    args, kwargs = tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, (order.call.args, order.call.kwargs)
    )
    # The windows come from process 0: these take no memory.
    blank = np.broadcast_to(np.float32(0), order.shape)
    inputs = Inputs(Activations(block.number, blank, order.row), replace(order.call, args=args, kwargs=kwargs))
    if order.kind == STATISTICS:
        _collect(inputs, block, Collector(block, order.wants), world)
        return
    for _ in _following(inputs, block, world):
        pass


def require_equal(world: World) -> None:
    """Raises UserError where processes would give other bits: other processors, threads or versions of torch."""
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(96, 768, generator=generator) for _ in range(2))
    with matmul_precision():
        product = one @ other.T
    digest = hashlib.sha256(product.numpy().tobytes()).hexdigest()
    told = (torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), digest)
    every: list[Any] = [None] * world.size
    distributed.all_gather_object(every, told)
    for rank, found in enumerate(every):
        if found != every[0]:
            raise UserError(
                f"torchrun: expected processes whose products are equal to the last bit, found {every[0][:3]} for the"
                f" first and {found[:3]} for process {rank}: start them on machines of one kind, with --threads"
            )


def _dealt(inputs: Inputs, world: World) -> Iterator[tuple[int, int, Tensor | None]]:
    """(first window of a turn, how many the turn has, this process's window of it) of every turn."""
    for first in range(0, len(inputs), world.size):
        count = min(world.size, len(inputs) - first)
        mine: list[Tensor | None] = [None]
        every = None
        if world.leads:
            every = [inputs.activations.window(first + rank) if rank < count else None for rank in range(world.size)]
        distributed.scatter_object_list(mine, every, src=0)
        yield first, count, None if mine[0] is None else mine[0].clone()


def _following(inputs: Inputs, block: Block, world: World) -> Iterator[tuple[Row, Tensor]]:
    """What goes into the next block: all windows on process 0, none elsewhere."""
    for first, _, window in _dealt(inputs, world):
        found: tuple[Row, Tensor] | UserError | None = None
        if window is not None:
            try:
                found = inputs.row.following(window, *inputs.output(block, first + world.rank, window))
            except UserError as error:
                found = error
        every: list[Any] | None = [None] * world.size if world.leads else None
        distributed.gather_object(found, every, dst=0)
        broken = world.share(next((one for one in every or () if isinstance(one, UserError)), None))
        if broken is not None:
            raise broken
        yield from (one for one in every or () if one is not None)


def _collect(inputs: Inputs, block: Block, collector: Collector, world: World) -> None:
    """The collector's moments: on process 0 all of them, elsewhere those that this process added up."""
    leaders: list[str] = []

    def mine(path: str) -> bool:
        if path not in leaders:
            leaders.append(path)
        return leaders.index(path) % world.size == world.rank

    for first, count, window in _dealt(inputs, world):
        seen = _seen(inputs, block, collector, first + world.rank, window)
        for rank in range(count):
            calls, tensors = _spread(seen if rank == world.rank else None, rank, world)
            collector.begin_window(first + rank)
            # As where hooks add them up, amid a forward.
            with matmul_precision(), suppress(Enough):
                for path, place in calls:
                    collector.see(path, tensors[place], mine)
    every: list[Any] | None = [None] * world.size if world.leads else None
    distributed.gather_object({path: collector.moments[path] for path in leaders if mine(path)}, every, dst=0)
    if every is not None:
        added: dict[str, Moments] = {path: moments for part in every for path, moments in part.items()}
        for path, leader in collector.leaders.items():
            collector.moments[path] = added[leader]


def _seen(inputs: Inputs, block: Block, collector: Collector, number: int, window: Tensor | None) -> Seen | UserError:
    """What the layers that the collector wants are given of a window, in the order of their calls."""
    calls: list[tuple[str, int]] = []
    tensors: dict[int, tuple[int, Tensor]] = {}

    def see(path: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        place, _ = tensors.setdefault(id(given[0]), (len(tensors), given[0]))
        calls.append((path, place))
        if len(calls) == collector.last_call:
            raise Enough

    if window is None:
        return calls, []
    handles = [block.linears[path].register_forward_pre_hook(partial(see, path)) for path in collector.wants]
    try:
        with suppress(Enough):
            inputs.output(block, number, window)
    except UserError as error:
        return error
    finally:
        for handle in handles:
            handle.remove()
    return calls, [tensor for _, tensor in tensors.values()]


def _spread(seen: Seen | UserError | None, rank: int, world: World) -> Seen:
    """What the process `rank` saw, for all. Raises its UserError everywhere."""
    head: list[Any] = [None]
    if rank == world.rank:
        told = [(tuple(x.shape), x.dtype) for x in seen[1]] if isinstance(seen, tuple) else None
        head = [seen if told is None else (seen[0], told)]  # type: ignore[index]
    distributed.broadcast_object_list(head, src=rank)
    if isinstance(head[0], UserError):
        raise head[0]
    calls, shapes = head[0]
    tensors = []
    for place, (shape, dtype) in enumerate(shapes):
        x = seen[1][place].contiguous() if isinstance(seen, tuple) else torch.empty(shape, dtype=dtype)
        distributed.broadcast(x, src=rank)
        tensors.append(x)
    return calls, tensors
