"""The one pass of the calibration text through a block that feeds all of its stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import Moments, Wants
from compress.calibration.activations import Enough, Inputs, check_window
from compress.errors import UserError
from compress.model import experts
from compress.model.block import Block
from compress.recipe.block_stages import Experts


def union(wanted: Iterable[Mapping[str, Wants]]) -> dict[str, Wants]:
    """What several stages want together, by path of a linear layer."""
    out: dict[str, Wants] = {}
    for wants in wanted:
        for path, want in wants.items():
            out[path] = want | out[path] if path in out else want
    return out


def collect(
    block: Block, inputs: Inputs, wants: Mapping[str, Wants], few: Experts, walk: "Walk | None" = None
) -> dict[str, Moments]:
    """Moments of the inputs of the linear layers in `wants`, by path.

    Layers that read one tensor (q, k and v) share one Moments where they want the same. `few` says what becomes of
    experts that saw too few tokens: their layers go to `block.starved` and have no moments, or they are shown every
    token in a second pass. What each expert saw goes to `block.experts`. `walk` takes the windows through a block
    without experts; None: this process alone does.
    Raises UserError for NaN and infinity, naming window and layer.
    """
    collector = Collector(block, wants)
    with experts.counted(block.module) as counts:
        if walk is None or not collector.steady:
            collector.run(inputs)
        else:
            walk(collector, inputs)
    block.experts = experts.records(block.number, counts, few)
    # An expert that no token reached has no moments, whatever the recipe asks for at least.
    hungry = experts.starved(counts, max(few.min_tokens, 1))
    layers = {path for path in wants for expert in hungry if path.startswith(f"{expert}.")}
    seen = {path: moments for path, moments in collector.moments.items() if path not in layers}
    if layers and few.expert_fallback == "all-tokens":
        everything = Collector(block, {path: wants[path] for path in wants if path in layers})
        with experts.counted(block.module, hungry):
            everything.run(inputs)
        seen |= everything.moments
    # Layers that the text does not reach at all are starved too: attention to an encoder that is not there.
    block.starved = frozenset(wants.keys() - seen.keys())
    return seen


class Collector:
    """Hooks on linear layers that add what they see."""

    def __init__(self, block: Block, wants: Mapping[str, Wants]):
        self.block, self.wants = block, dict(wants)
        self.moments: dict[str, Moments] = {}
        # path → the layer whose Moments it shares, itself for one that has its own
        self.leaders: dict[str, str] = {}
        # id of a tensor of the window that runs → the first layer that read it, and the tensor: held, its id is its own
        self.seen: dict[int, tuple[str, Tensor]] = {}
        # path → the window in which it was seen first
        self.began: dict[str, int] = {}
        self.window = 0
        # Where a drift is wanted: path → what the original has there in the window that runs, seen before it.
        self.exact: dict[str, Tensor] = {}
        self.is_twin = False
        self.drifts = any(want.drift for want in self.wants.values())
        # What comes out of the block is thrown away (these are the weights before the stages): a window is done when
        # its last input was seen. How many there are the first one tells, which goes through to the end, as all windows
        # of a mixture do: which experts are called is the text's affair.
        self.calls = 0
        self.last_call: int | None = None
        self.steady = not any(isinstance(module, experts.UnfusedExperts) for module in block.module.modules())

    def run(self, inputs: Inputs) -> None:
        """Sends all windows through the block, as far as there is something to see."""
        with self._hooked():
            self._see_twin(inputs, 0)
            for number, _ in enumerate(inputs.show(self.block)):
                self._see_twin(inputs, number + 1)
                self.begin_window(number + 1)
        self.seen.clear()

    def begin_window(self, number: int) -> None:
        """The window `number` is what is seen from now on."""
        self.window = number
        self.seen.clear()
        self.last_call, self.calls = (self.calls or None) if self.steady else None, 0

    def _see_twin(self, inputs: Inputs, number: int) -> None:
        """Keeps what the original has in the window that comes next, where there is one."""
        if self.drifts and number < len(inputs):
            self.exact, self.is_twin = {}, True
            inputs.show_twin(self.block, number)
            self.is_twin = False

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = [self.block.linears[path].register_forward_pre_hook(partial(self._hook, path)) for path in self.wants]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, path: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        if self.is_twin:
            self.exact[path] = given[0].detach()
        else:
            self.see(path, given[0])

    def see(self, path: str, x: Tensor, mine: Callable[[str], bool] = lambda path: True) -> None:
        """What a layer is given; `mine`: whether what a layer sees is added up here.

        Raises Enough after a window's last one, and UserError for NaN and infinity.
        """
        first, _ = self.seen.setdefault(id(x), (path, x))
        leader = self.leaders.get(path)
        if leader is None:
            # Only one that has begun in this very window has missed nothing that the leader has seen.
            is_fresh = self.leaders.get(first) == first and self.began.get(first) == self.window
            shares = first != path and self.wants[first] == self.wants[path] and is_fresh
            leader = self.leaders[path] = first if shares else path
            if not shares:
                self.began[path] = self.window
            if mine(leader):
                self.moments[path] = self.moments[leader] if shares else Moments(x.shape[-1], self.wants[path])
        if leader == path:
            check_window(x, self.window, f"the inputs of {self.block.prefix}.{path}")
            if mine(path):
                with torch.no_grad():
                    self.moments[path].add(x, self.exact[path] if self.wants[path].drift else None)
        elif first != leader:
            raise UserError(
                f"{self.block.prefix}.{path}: expected layers that share their inputs in every window or in none, "
                f"found one that reads {leader}'s in some: use a recipe that looks at no text"
            )
        self.calls += 1
        if self.calls == self.last_call:
            raise Enough


# Takes the windows of a text through the collector's block, in order.
Walk = Callable[[Collector, Inputs], None]
