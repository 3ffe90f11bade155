"""Rounding to nearest in the format that a weight is stored in: what an error is compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.formats import fp8, mxfp4, nf4, three_of_four
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS

_LEVELS = {"nf4": nf4.LEVELS, "mxfp4": mxfp4.LEVELS}
_TINY = 1e-30
# Rows of which the codes are counted.
_ROWS = 256


@dataclass(frozen=True)
class Grid:
    """A format, as far as rounding to nearest depends on it.

    kind   of codes; bits: that the codes really use; width: inputs that share a scale; zeros: whether with zero points.
    scale  ternary's, one for the whole tensor: the mean magnitude.
    """

    kind: str
    bits: int
    width: int
    zeros: bool
    scale: float = 0.0


def grid_of(weight: PackedWeight, mean: float) -> Grid | None:
    """The grid of a packed weight; None for sequences of a trellis, which no rounding of single weights gives.

    mean  magnitude of the original's weights.
    """
    scheme = weight.scheme
    if KINDS[scheme.kind].has_tiles:
        return None
    bits = scheme.bits
    if scheme.kind == "int8":
        # Some formats keep codes of fewer bits in eight (GGUF's Q5 and Q6), or a few levels of them (its IQ4).
        low, high = (int(value) for value in torch.aminmax(weight.codes))
        span = high - low if weight.offset is not None else 2 * max(high, -low - 1) + 1
        used = int(torch.bincount(weight.codes[:_ROWS].flatten().to(torch.int32) + 128).count_nonzero())
        bits = max(2, min(8, span.bit_length(), (used - 1).bit_length()))
    return Grid(scheme.kind, bits, scheme.group_size or weight.shape[1], weight.offset is not None, mean)


def round_rows(rows: Tensor, grid: Grid) -> Tensor:
    """(n, K) float32 rows, in the order in which they are grouped, rounded to nearest; float32 again."""
    groups = rows.view(rows.shape[0], -1, grid.width)
    if grid.kind in _LEVELS:
        return _to_levels(groups, grid.kind).view_as(rows)
    if grid.kind == "fp8":
        scale = rows.abs().amax(1, keepdim=True).clamp_min(_TINY) / fp8.LIMIT
        return (rows / scale).to(fp8.DTYPE).float() * scale
    if grid.kind == "ternary-1.25":
        codes, scale = three_of_four.nearest(rows)
        return codes * scale
    if grid.kind == "ternary":
        scale = torch.tensor(grid.scale) if grid.width == rows.shape[1] else groups.abs().amax(-1, keepdim=True)
        scale = scale.clamp_min(_TINY)
        return ((groups / scale).round().clamp(-1, 1) * scale).view_as(rows)
    low, high = -(1 << grid.bits - 1), (1 << grid.bits - 1) - 1
    if not grid.zeros:
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(_TINY) * (2 / (high - low))
        return (groups / scale).round_().clamp_(low, high).mul_(scale).view_as(rows)
    least, most = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (most - least).clamp_min(_TINY) / (high - low)
    zero = (low - least / scale).round()
    return (groups / scale).add_(zero).round_().clamp_(low, high).sub_(zero).mul_(scale).view_as(rows)


def _to_levels(groups: Tensor, kind: str) -> Tensor:
    levels = _LEVELS[kind].sort().values
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(_TINY)
    # Powers of two, the largest weight within the largest level.
    scale = largest if kind == "nf4" else torch.exp2(torch.floor(torch.log2(largest)) - 2)
    middles = (levels[:-1] + levels[1:]) / 2
    return levels[torch.bucketize(groups / scale, middles)] * scale
