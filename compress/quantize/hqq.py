"""HQQ: half-quadratic quantisation, which looks at the weights only (Badri and Shaji, 2023).

A group's scale and zero point shall make Σ |w − (c − zero) · scale|^p least, with p < 1: a few large errors, of weights
far from all others, may stay if the many become smaller. Half-quadratic splitting takes turns: the errors e that are to
stay come from a shrinkage in closed form, and then scale and zero are the line that fits w − e to the codes.

Squared error (p = 2) is `grid.fit`'s search; on the pair's layers that one damages the outputs less than p = 0.7.
"""

import torch
from torch import Tensor

from compress.quantize.grid import Grid, encode, fit_groups, grouped, nearest, to_packed
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import group_width, round_scale

# The published solver's: the penalty that ties errors to their copies, and its growth at each turn.
_PENALTY, _GROWTH = 10.0, 1.01


def quantize(weight: Tensor, grid: Grid, dtype: torch.dtype) -> PackedWeight:
    """Codes of a weight (N, K) of any float dtype, on the grid that `fit` finds."""
    scale, zero = fit(weight, grid, dtype)
    return to_packed(encode(weight, scale, zero, grid), scale, zero, grid)


def fit(weight: Tensor, grid: Grid, dtype: torch.dtype, norm: float = 0.7, turns: int = 20) -> tuple[Tensor, Tensor]:
    """Scale and zero point (N, G) float32 as `grid.fit` gives them, of which Σ |error|^norm is least.

    norm     p, in (0, 1].
    turns    at most so many; it is over when no group gains.
    Unlike the published solver it moves the scale too, because a stored zero point is an integer, and measures errors
    in steps of the grid, so that its constants mean the same for every layer. No group is worse than `grid.fit`'s
    search makes it.

    Raises ValueError for another `norm`, and as `grid.fit` does.
    """
    if not 0 < norm <= 1:
        raise ValueError(f"the norm lies in (0, 1], found {norm}")
    n, k = weight.shape
    width = group_width(k, grid.group_size)
    scale, zero = (torch.empty(n, k // width) for _ in range(2))
    for rows, values in grouped(weight, width):
        scale[rows], zero[rows] = _fit_groups(values, grid, dtype, norm, turns)
    return scale, zero


def _fit_groups(values: Tensor, grid: Grid, dtype: torch.dtype, norm: float, turns: int) -> tuple[Tensor, Tensor]:
    """Scale and zero (…) of groups along the first dimension of `values` (B, …) float32."""
    # The solver finds the valley it starts in. The published start is the whole range; that of least squared error is
    # better, where a symmetric scale may be negative above all. The loss is lower still in valleys far from both, with
    # so many weights beyond the range that a layer's outputs are worse than rounded to nearest.
    best = fit_groups(values, grid, dtype, search=True)
    least = _loss(values, *best, grid, norm)
    found, penalty = best, _PENALTY
    for _ in range(turns):
        steps = nearest(values, *found, grid)
        error = (values / found[0]).sub_(steps)
        sizes = error.abs()
        # What stays of each error, in steps; an error of 0 stays 0, whose power is infinite.
        stays = error.sign_().mul_((sizes - sizes.pow(norm - 1) / penalty).clamp_(min=0))
        found = _line(torch.addcmul(values, stays, found[0], value=-1), steps, *found, grid, dtype)
        penalty *= _GROWTH
        loss = _loss(values, *found, grid, norm)
        less = loss < least
        if not bool(less.any()):
            break
        scale, zero = (torch.where(less, new, old) for new, old in zip(found, best, strict=True))
        best, least = (scale, zero), torch.where(less, loss, least)
    return best


def _loss(values: Tensor, scale: Tensor, zero: Tensor, grid: Grid, norm: float) -> Tensor:
    """Σ |error|^norm of each group."""
    return torch.addcmul(values, nearest(values, scale, zero, grid), scale, value=-1).abs_().pow_(norm).sum(dim=0)


def _line(
    values: Tensor, steps: Tensor, scale: Tensor, zero: Tensor, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The scale and zero of least squared distance between `values` and the codes steps + zero; (B, …) each."""
    if not grid.symmetric:
        centred = steps - steps.mean(dim=0)
        slope = (centred * values).sum(dim=0) / (centred * centred).sum(dim=0)
        shift = (steps.mean(dim=0) - values.mean(dim=0) / slope).round_()
        # A group of one code, or of a line that falls, has none.
        shift = torch.where(torch.isfinite(shift) & (slope > 0), shift, 0)
        moved = (zero + shift).clamp_(grid.low, grid.high)
        steps, zero = steps - (moved - zero), moved
    slope = (steps * values).sum(dim=0) / (steps * steps).sum(dim=0)
    usable = torch.isfinite(slope) & (slope * scale > 0)
    return torch.where(usable, round_scale(torch.where(usable, slope, scale), dtype), scale), zero
