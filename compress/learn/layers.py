"""Packed linear layers of which scales, levels and roundings can be trained.

A layer computes with floats what its kernels compute with integers, from numbers as files hold them; gradients pass
each rounding as if it were not there. So a trained layer is packed as it is: nothing is rounded afterwards. Scales
start where the codes were chosen, as in LSQ (1902.08153); a code moves when its place, a float beside it, has come to
a neighbour's side (as in AdaRound, 2004.10568, with the straight-through estimator for its relaxation).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.qat.layers import blend, pass_through, round_inputs
from runtime.formats.codes import whole_zeros
from runtime.formats.packed import Kind, PackedWeight, Tiles
from runtime.formats.tensors import round_scale
from runtime.formats.trellis import decode, signed_levels, state_grid

_MOST_LEVEL = 127


class LearnedLinear(nn.Module, ABC):
    """A packed layer whose scales are trained; what its codes are is up to the classes below.

    packed  the layer as it was made, (N, K), inputs in their order; its tensors are not changed.
    bias    (N,), or None: shared with the model, which trains it or does not.
    stored  the dtype that scales are stored in: products are made with scales rounded to it.

    gain    parameter (N, G): by how much each scale has changed, as a share of what it was.
    """

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None, stored: torch.dtype):
        super().__init__()
        if packed.perm is not None or packed.scheme.activation not in _INPUTS:
            raise ValueError(f"scales are trained of weights in input order, not of {packed.scheme} in another")
        self.start, self.stored, self.bias = replace(packed, bias=None), stored, bias
        self.out_features, self.in_features = packed.shape
        self.first: Tensor
        self.register_buffer("first", packed.scale.clone(), persistent=False)
        self.gain = nn.Parameter(torch.zeros_like(packed.scale))

    def scale(self) -> Tensor:
        """(N, G) float32, as they will be stored."""
        wanted = self.first * (1 + self.gain)
        return blend(wanted, round_scale(wanted.detach(), self.stored), 1.0)

    @abstractmethod
    def steps(self) -> Tensor:
        """(N, K) float32: codes less their zero points, or levels; the weight in units of its scale."""

    @property
    def weight(self) -> Tensor:
        """(N, K) float32: what the layer stands for now."""
        scale = self.scale()
        groups = self.steps().unflatten(1, (scale.shape[1], -1))
        return (groups * scale.unsqueeze(-1)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N), inputs rounded as kernels round them."""
        rounded = _INPUTS[self.start.scheme.activation](x, self.start.scheme.group_size)
        return F.linear(rounded.to(x.dtype), self.weight.to(x.dtype), self.bias)

    @abstractmethod
    def packed(self) -> PackedWeight:
        """The layer as its format has it, without its bias, which is a tensor of its own."""


_INPUTS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "float": lambda x, group: x,
    "int8-token": lambda x, group: round_inputs(x),
    "int8-group": round_inputs,
}


class LearnedGrid(LearnedLinear):
    """Integers, with or without zero points.

    weight  (N, K) what the codes were chosen for: it says which of them were nearly rounded the other way. None: codes
            stay as they are.
    reach   how many codes up and down one may move.

    place   parameter (N, K): where in units of the scale each weight stands, zero point included; its code is the
            nearest one. It starts at the weight; where GPTQ has taken another code than the weight's nearest, to make
            up for other errors, at that code, for the weight says nothing of it then.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias: nn.Parameter | None,
        stored: torch.dtype,
        weight: Tensor | None = None,
        reach: int = 1,
    ):
        super().__init__(packed, bias, stored)
        zeros = whole_zeros(packed)
        self.zero: Tensor
        # HQQ's zero points are no whole numbers; scaled they are the same ones.
        zero = packed.offset / packed.scale if zeros is None and packed.offset is not None else zeros
        self.register_buffer("zero", zero, persistent=False)
        self.codes: Tensor
        self.register_buffer("codes", packed.codes, persistent=False)
        self.reach, half = reach, 1 << packed.scheme.bits - 1
        self.low, self.high = -half, half - 1
        self.place: nn.Parameter | None = None
        if weight is not None:
            exact = weight.float().unflatten(1, (packed.scale.shape[1], -1)) / packed.scale.unsqueeze(-1)
            codes, exact = packed.codes.float(), (exact + self.zero.unsqueeze(-1)).flatten(1)
            # What lies beyond the grid's ends starts at them: from afar it would never come back.
            exact = exact.clamp(self.low, self.high)
            self.place = nn.Parameter(torch.where(exact.round() == codes, exact, codes))

    def moved(self) -> Tensor:
        """(N, K) float32: the codes as they are now."""
        codes = self.codes.float()
        if self.place is None:
            return codes
        near = self.place.detach().round().clamp(codes - self.reach, codes + self.reach)
        return blend(self.place, near.clamp(self.low, self.high), 1.0)

    def steps(self) -> Tensor:
        groups = self.moved().unflatten(1, (self.zero.shape[1], -1))
        return (groups - self.zero.unsqueeze(-1)).flatten(1)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        scale = self.scale().cpu()
        offset = None if self.start.offset is None else scale * self.zero.cpu()
        return replace(self.start, codes=self.moved().to(torch.int8).cpu(), scale=scale, offset=offset)


class LearnedTrellis(LearnedLinear):
    """A trellis: its sequences stay, the levels that they choose are trained.

    shift   parameter (128,): by how much each level has changed, as a share of the largest.
    """

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None, stored: torch.dtype):
        super().__init__(packed, bias, stored)
        if packed.tiles is None:
            raise ValueError("expected a trellis with its sequences, found levels alone")
        self.sequences, self.levels = packed.tiles.sequences, packed.tiles.levels
        self.shift = nn.Parameter(torch.zeros(len(self.levels)))
        self.states: Tensor
        states = state_grid(self.sequences, packed.scheme.bits, packed.shape)
        self.register_buffer("states", states, persistent=False)

    def table(self) -> Tensor:
        """(128,) float32: the levels as they are now, whole numbers."""
        wanted = self.levels.to(self.shift.device).float() + _MOST_LEVEL * self.shift
        return pass_through(wanted.clamp(-_MOST_LEVEL, _MOST_LEVEL))

    def steps(self) -> Tensor:
        return signed_levels(self.table())[self.states.long()]

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        levels = self.table().to(torch.int8).cpu()
        codes = decode(self.sequences, levels, self.start.scheme.bits, self.start.shape)
        return replace(self.start, codes=codes, scale=self.scale().cpu(), tiles=Tiles(self.sequences, levels))


# Kinds of codes that are learned, and whether their roundings are, too.
ROUNDED: frozenset[Kind] = frozenset({"int4", "int6", "int8"})
KINDS: frozenset[Kind] = ROUNDED | {"trellis"}


def learned(
    packed: PackedWeight, bias: nn.Parameter | None, stored: torch.dtype, weight: Tensor | None, reach: int
) -> LearnedLinear:
    """The layer to train; `weight` as `LearnedGrid` has it. Raises ValueError for a kind that is not in KINDS."""
    if packed.scheme.kind == "trellis":
        return LearnedTrellis(packed, bias, stored)
    if packed.scheme.kind not in ROUNDED:
        raise ValueError(f"only {', '.join(sorted(KINDS))} are learned, found {packed.scheme.kind}")
    return LearnedGrid(packed, bias, stored, weight, reach)
