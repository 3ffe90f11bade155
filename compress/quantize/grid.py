"""Integer grids: a scale and a zero point per output row and group of inputs, and the codes between them.

A weight w becomes the code c = clamp(round(w / scale) + zero) and is read back as (c − zero) · scale. Codes are signed,
−2^(b−1)..2^(b−1)−1 for b bits, and so is the zero point, an integer among them (0 where the grid is symmetric).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import GRID_KINDS
from runtime.formats.tensors import group_width, round_scale

# The search tries the whole range and shrinks it by sixteenths; between two of them the least-squares scale of
# the codes finds the place, so that a few are enough.
_SHRINKS = tuple(1 - step / 16 for step in range(12))
# Values that are fitted at once: what a core's cache holds of a dozen passes over them.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Grid:
    """Integers of `bits` (2 to 8) with a scale per row and `group_size` inputs; 0: one scale per row."""

    bits: int
    group_size: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8 or self.group_size < 0:
            raise ValueError(f"a grid has 2 to 8 bits and a group size of 0 or more, found {self}")

    @property
    def low(self) -> int:
        return -(1 << self.bits - 1)

    @property
    def high(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def steps(self) -> int:
        """Steps between the lowest and the highest code."""
        return (1 << self.bits) - 1


def fit(
    weight: Tensor, grid: Grid, dtype: torch.dtype, importance: Tensor | None = None, search: bool = False
) -> tuple[Tensor, Tensor]:
    """Scale and zero point (N, G) float32 of a weight (N, K); scales are rounded to `dtype`, as they will be stored.

    Symmetric: scale = absmax / ((2^bits − 1) / 2), compressed-tensors' rule, and zero 0. Asymmetric: from the lowest to
    the highest weight, 0 always included. `search` looks for the narrower range whose squared error is least, each
    weight's counted `importance` times ((K,) or (N, K); None: all alike), and takes the least-squares scale of the
    codes found; a symmetric grid's may be negative. A group of zeros has `dtype`'s epsilon for a scale, and codes that
    are read back as 0.

    Raises ValueError where groups do not divide K, for weights that are not finite, or scales that overflow `dtype`.
    """
    n, k = weight.shape
    width = group_width(k, grid.group_size)
    if importance is not None:
        importance = importance.float().expand(n, k)
    scale, zero = (torch.empty(n, k // width) for _ in range(2))
    for rows, values in grouped(weight, width):
        weights = None if importance is None else importance[rows].reshape(-1, k // width, width).permute(2, 0, 1)
        scale[rows], zero[rows] = fit_groups(values, grid, dtype, weights, search)
    return scale, zero


def grouped(weight: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a weight (N, K) at a time, as float32 (width, rows, groups): a group along the first dimension."""
    n, k = weight.shape
    step = max(1, _CHUNK // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        yield rows, weight[rows].float().view(-1, k // width, width).permute(2, 0, 1).contiguous()


def expect_finite(what: str, values: Tensor) -> None:
    """Raises ValueError naming `what` where a value is NaN or infinite: the extremes tell, without a mask."""
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):
        raise ValueError(f"{what} has values that are NaN or infinite")


def fit_groups(
    values: Tensor, grid: Grid, dtype: torch.dtype, importance: Tensor | None = None, search: bool = False
) -> tuple[Tensor, Tensor]:
    """Like `fit` for groups that lie along the first dimension: values (B, …) float32, scale and zero (…).

    `importance` broadcasts to `values`. Raises ValueError as `fit` does.
    """
    tried = ranges(values, grid, dtype)
    scale, zero = next(tried)
    if not search:
        return scale, zero
    weighted = values if importance is None else values * importance
    gain = torch.full_like(scale, -math.inf)
    for narrow, shifted in itertools.chain([(scale, zero)], tried):
        codes = nearest(values, narrow, shifted, grid)
        # The error is Σ h (w − s c)² = Σ h w² − (2 s Σ h w c − s² Σ h c²): a parabola in s, and its top is known.
        products = (weighted * codes).sum(dim=0)
        squares = (codes.square_() if importance is None else codes.square_().mul_(importance)).sum(dim=0)
        best = products / squares
        usable = (squares > 0) & (best * narrow > 0)
        narrow = torch.where(usable, round_scale(torch.where(usable, best, narrow), dtype), narrow)
        found = narrow * (2 * products - narrow * squares)
        better = found > gain
        gain = torch.where(better, found, gain)
        scale, zero = torch.where(better, narrow, scale), torch.where(better, shifted, zero)
    return scale, zero


def ranges(values: Tensor, grid: Grid, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zeros (…) that a search tries for groups along the first dimension of `values`: the whole range first.

    Raises ValueError as `fit` does.
    """
    low, high = torch.aminmax(values, dim=0)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        raise ValueError("the weight has values that are NaN or infinite")
    for shrink in _SHRINKS:
        scale, zero = _from_range(low * shrink, high * shrink, grid, dtype)
        yield scale, zero
        if grid.symmetric:
            # There is one code more below 0 than above: a negative scale gives it to the side that needs it.
            yield -scale, zero


def _from_range(low: Tensor, high: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero of the grid that spans low..high: about 0 where it is symmetric, else with 0 in it."""
    if grid.symmetric:
        scale = round_scale(torch.maximum(high, -low) / (grid.steps / 2), dtype)
        return scale, torch.zeros_like(scale)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = round_scale((high - low) / grid.steps, dtype)
    return scale, (grid.low - low / scale).round().clamp(grid.low, grid.high)


def nearest(values: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """The nearest codes minus their zero, float32, of the shape of `values`, to which scale and zero broadcast."""
    return torch.div(values, scale).round_().clamp_(*limits(zero, grid))


def limits(zero: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """What a code less its zero lies between: clamping to that saves adding the zero and taking it off again."""
    return grid.low - zero, grid.high - zero


def encode(weight: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """The nearest codes (N, K) int8 of a weight (N, K); scale and zero (N, G) as `fit` gives them."""
    n, k = weight.shape
    groups = weight.float().view(n, scale.shape[1], -1)
    steps = nearest(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), grid)
    return steps.add_(zero.unsqueeze(-1)).to(torch.int8).view(n, k)


def decode(codes: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """(N, K) float32: what codes (N, K) are read back as."""
    n, k = codes.shape
    groups = codes.float().view(n, scale.shape[1], -1)
    return ((groups - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).view(n, k)


def to_packed(codes: Tensor, scale: Tensor, zero: Tensor, grid: Grid, bias: Tensor | None = None) -> PackedWeight:
    """The layer as every kernel takes it: 2 to 6 bits as schemes.py has them, 8 bits per row as int8.

    Raises ValueError for a grid that no format holds.
    """
    if grid.bits in GRID_KINDS:
        scheme = Scheme(GRID_KINDS[grid.bits], grid.bits, grid.group_size, grid.symmetric, "int8-group")
    elif grid.bits == 8 and grid.symmetric and grid.group_size == 0:
        scheme = Scheme("int8", 8, 0, True, "int8-token")
    else:
        raise ValueError(f"formats hold 2 to 6 bits, and 8 symmetric ones with a scale per row; found {grid}")
    offset = None if grid.symmetric else scale * zero
    return PackedWeight(scheme, codes, scale, offset=offset, bias=None if bias is None else bias.float())
