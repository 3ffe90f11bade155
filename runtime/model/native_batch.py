"""The rows of a forward as the native decoder takes them."""

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import Reserved, paths
from runtime.contract import Rows, integers
from runtime.kv_store import Store
from runtime.native.structs import BatchStruct, StoreStruct


def int64(values: Tensor) -> Tensor:
    """(n,) int64, contiguous, on the CPU: the tensor itself where it is that already, as a rule."""
    if values.dtype is torch.int64 and values.is_cpu and values.is_contiguous():
        return values
    return values.to("cpu", torch.int64).contiguous()


class _Chain(threading.local):
    """The struct of a thread's last forward of one request's rows: from one round to the next few numbers of it change.

    of    whose memory it tells of, which is not to be kept alive; stores: its structs.
    kept  the numbers that it points to.
    """

    def __init__(self) -> None:
        self.struct = BatchStruct(requests=1)
        self.of: Callable[[], Store | None] = lambda: None
        self.stores: Any = None
        self.kept: tuple[Tensor, ...] = ()


class Batches:
    """Makes batches. What chains need is the same in every call, so it is kept, as long as a wide call needed it."""

    def __init__(self) -> None:
        self._constants = torch.empty((3, 0), dtype=torch.int64).unbind()
        self._chain_struct = _Chain()

    def constants(self, count: int) -> tuple[Tensor, ...]:
        """`count` and maybe more zeros, −1 (a row without a list of slots), and 0, 1, 2, …, int64."""
        found = self._constants
        # Not read back after growing: another thread's forward may put a shorter one there.
        if found[0].numel() < count:
            order = torch.arange(max(8, 2 * count))
            found = self._constants = torch.zeros_like(order), torch.full_like(order, -1), order
        return found

    def of(
        self, reserved: Sequence[Reserved], tokens: int, rows: Rows, cache: KeyValueCache
    ) -> tuple[BatchStruct, Any]:
        """The rows, whose slots are taken, and what must stay alive in the call; good until the thread's next one.

        tokens  where they lie, int64.
        """
        if len(reserved) == 1 and not cache.format.state:
            one, parents = reserved[0], reserved[0].parents
            return self._chain(one, tokens, cache) if parents is None else self._tree(one, parents, tokens, cache)
        count = len(rows)
        zeros, chain, _ = self.constants(count)
        request, tail_from, tail_at, tail = zeros, zeros, chain, zeros
        positions = int64(rows.position)
        slot = positions
        stores = (StoreStruct * (len(reserved) * len(cache.formats)))(
            *[_store(cache, r.request, group) for group in range(len(cache.formats)) for r in reserved]
        )
        if len(reserved) > 1:
            # Not torch.repeat_interleave: it wakes all of torch's threads, which then spin on the kernels' cores.
            request = integers([number for number, r in enumerate(reserved) for _ in range(r.count)])
        if any(r.parents is not None for r in reserved):
            slot, tail_from, tail_at, tail = _tails(reserved, positions)
        kept = [request, positions, slot, tail_from, tail_at, tail]
        batch = BatchStruct(count, tokens, *[part.data_ptr() for part in kept], stores, requests=len(reserved))
        if cache.format.state and slot is not positions:
            kept.append(integers([r.before(row) for r in reserved for row in range(r.count)]))
            batch.before = kept[-1].data_ptr()
        return batch, [kept, stores]

    def _chain(self, of: Reserved, tokens: int, cache: KeyValueCache) -> tuple[BatchStruct, Any]:
        """One request's, which is what most forwards are, and small models feel each microsecond of: kept numbers."""
        own = self._chain_struct
        constants, struct = self.constants(of.start + of.count), own.struct
        if constants is not own.kept:
            zeros, chain, _ = own.kept = constants
            struct.request = struct.tail_from = struct.tail = zeros.data_ptr()
            struct.tail_at = chain.data_ptr()
        self._take_stores(own, cache.stores(of.request))
        struct.rows, struct.tokens = of.count, tokens
        struct.position = struct.slot = constants[2].data_ptr() + constants[2].itemsize * of.start
        return struct, None

    def _tree(self, of: Reserved, parents: Sequence[int], tokens: int, cache: KeyValueCache) -> tuple[BatchStruct, Any]:
        """One request's tree, its numbers in one array: as many tensors cost as much as a row of a small model."""
        zeros, _, order = self.constants(of.start + of.count)
        own = self._chain_struct
        self._take_stores(own, cache.stores(of.request))
        branches = paths(parents)
        position = [of.start + len(branch) - 1 for branch in branches]
        tail_at = [0, *accumulate(map(len, branches))][:-1]
        slots = [of.start + row for branch in branches for row in branch]
        made = integers([*position, *([of.start] * of.count), *tail_at, *slots])
        first, row = made.data_ptr(), made.itemsize * of.count
        return BatchStruct(
            *(of.count, tokens, zeros.data_ptr(), first, order.data_ptr() + order.itemsize * of.start),
            *(first + row, first + 2 * row, first + 3 * row, own.stores),
            requests=1,
        ), [zeros, order, made, own.stores]

    @staticmethod
    def _take_stores(own: _Chain, stores: tuple[Store, ...]) -> None:
        """Has the thread's struct tell of one request's memory: the same as in the last call, as a rule."""
        if own.of() is not stores[0]:
            own.stores = (StoreStruct * len(stores))(*[StoreStruct(*store.pointers) for store in stores])
            own.of, own.struct.stores = ref(stores[0]), own.stores


def _store(cache: KeyValueCache, request: int, group: int) -> StoreStruct:
    states = cache.states(request)
    return StoreStruct(*cache.store(request, group).pointers, *(() if states is None else states.pointers))


def _tails(reserved: Sequence[Reserved], positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row its slot, where its own list of slots begins (position, and index in the last array; −1: no list)."""
    slot, tail_from = positions.tolist(), [0] * len(positions)
    tail_at = [-1] * len(positions)
    tail: list[int] = []
    for r in reserved:
        if r.parents is None:
            continue
        for index, path in enumerate(paths(r.parents)):
            row = r.first + index
            slot[row], tail_from[row], tail_at[row] = r.start + index, r.start, len(tail)
            tail += [r.start + place for place in path]
    return torch.tensor(slot), torch.tensor(tail_from), torch.tensor(tail_at), torch.tensor(tail)
