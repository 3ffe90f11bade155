"""A weight beside the original's: how far it is from it, and from what rounding to nearest would give."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.check.layers import Stored, plain_rows, rows_of, slices
from compress.check.nearest import Grid, grid_of, round_rows
from runtime.formats.packed import PackedWeight

# Rows and columns of the sample that stands for a weight where many are compared with each other.
_SKETCH = 32
# Rows that causes are tried on: whole runs of _RUN, for some layouts interleave rows.
_SAMPLE, _RUN = 256, 32
_TINY = 1e-30
# The smallest factor of a scaling.
_LEAST = 1e-4


@dataclass(frozen=True, eq=False)
class Sight:
    """One pass over a weight alone.

    sketch  values at fixed places of weights of this shape.
    mean    magnitude; spread: root mean square; bad: how many values are not finite; constant: all are the same.
    zeros   share of zeros; tail: how many of the last rows are all zeros.
    """

    sketch: Tensor
    mean: float
    spread: float
    bad: int
    constant: bool
    zeros: float
    tail: int


@dataclass(frozen=True, eq=False)
class Distance:
    """A weight compared with the original's.

    error, nearest   relative Frobenius errors, ours and that of rounding to nearest (None: plain, or a trellis).
    cosine           of the two as vectors; zeros: share of zeros that rounding to nearest would give.
    rows             (N,) how far each row is: squared error over that of rounding to nearest, or over the row's square.
    """

    error: float
    nearest: float | None
    cosine: float
    zeros: float
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """Factors by which rows and columns of the original were multiplied before it was compressed (AWQ, SmoothQuant)."""

    rows: Tensor
    columns: Tensor

    def of(self, rows: Tensor, which: slice | Tensor) -> Tensor:
        """Rows of the original, multiplied."""
        return rows * self.rows[which].unsqueeze(1) * self.columns


def look(weight: Stored) -> Sight:
    """One pass over a weight, rows at a time."""
    n, k = rows_of(weight)
    places, columns = _places(n), _places(k)
    sketch = torch.zeros(len(places), len(columns))
    total = squares = 0.0
    bad = zeros = 0
    least, most = float("inf"), -float("inf")
    last_full = -1
    for part in slices(n, k):
        rows = plain_rows(weight, part)
        finite = torch.isfinite(rows)
        if not bool(finite.all()):
            bad += int((~finite).sum())
            rows = torch.where(finite, rows, 0.0)
        low, high = torch.aminmax(rows)
        least, most = min(least, float(low)), max(most, float(high))
        size = rows.abs()
        total += float(size.sum(dtype=torch.float64))
        squares += float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
        zeros += rows.numel() - int(torch.count_nonzero(rows))
        full = size.amax(1) > 0
        if bool(full.any()):
            last_full = part.start + int(full.nonzero()[-1])
        inside = (places >= part.start) & (places < part.stop)
        sketch[inside] = rows[places[inside] - part.start][:, columns]
    count = max(n * k, 1)
    return Sight(
        sketch.flatten(),
        total / count,
        (squares / count) ** 0.5,
        bad,
        least == most and count > 1,
        zeros / count,
        n - 1 - last_full,
    )


def sketch_of(weight: Tensor) -> Tensor:
    """The same places of a plain weight as `look` keeps."""
    n, k = rows_of(weight)
    return plain_rows(weight, _places(n))[:, _places(k)].flatten()


def _places(size: int) -> Tensor:
    """A few places of 0..size − 1, uneven ones, so that no period of a layout hides between them."""
    count = min(size, _SKETCH)
    steps = torch.linspace(0, size - 1, count).long()
    return torch.unique((steps + torch.arange(count) % 3).clamp(max=size - 1))


def distance(ours: Stored, original: Tensor, scaling: Scaling | None = None) -> Distance:
    """Both of one shape; one pass, rows at a time. `original` is what it is compared with, of any float type."""
    n, k = rows_of(ours)
    packed = ours if isinstance(ours, PackedWeight) else None
    mean = float(original.abs().mean(dtype=torch.float32)) if packed and packed.scheme.kind == "ternary" else 0.0
    grid: Grid | None = None if packed is None else grid_of(packed, mean)
    wrong = rounded = square = ours_square = product = 0.0
    zeros = 0
    rows_off = torch.zeros(n)
    for part in slices(n, k):
        found, real = plain_rows(ours, part), plain_rows(original, part)
        if scaling is not None:
            real = scaling.of(real, part)
        of_rows = (found - real).square_().sum(1)
        sizes = real.square().sum(1)
        wrong, square = wrong + float(of_rows.sum(dtype=torch.float64)), square + float(sizes.sum(dtype=torch.float64))
        product += float((found * real).sum(dtype=torch.float64))
        ours_square += float(found.square().sum(dtype=torch.float64))
        base = sizes
        if grid is not None:
            grouped = real if packed is None or packed.perm is None else real[:, packed.perm]
            near = round_rows(grouped, grid)
            zeros += near.numel() - int(torch.count_nonzero(near))
            base = near.sub_(grouped).square_().sum(1)
            rounded += float(base.sum(dtype=torch.float64))
        rows_off[part] = of_rows / base.clamp_min(_TINY)
    square = max(square, _TINY)
    return Distance(
        (wrong / square) ** 0.5,
        (rounded / square) ** 0.5 if grid is not None else None,
        product / max((square * ours_square) ** 0.5, _TINY),
        zeros / max(n * k, 1),
        rows_off,
    )


def sample_rows(n: int) -> Tensor:
    """Rows to try causes on: runs of rows that follow each other, spread over the weight."""
    if n <= _SAMPLE:
        return torch.arange(n)
    runs = _SAMPLE // _RUN
    starts = torch.linspace(0, (n - _RUN) // _RUN, runs).long() * _RUN
    return (starts[:, None] + torch.arange(_RUN)).flatten()


def find_scaling(ours: Stored, original: Tensor) -> Scaling:
    """The factors of rows and columns that bring the original nearest to ours, by two rounds of least squares.

    Columns' factors come from a sample of rows. Rows and columns can trade a common factor; the rows' median is 1.
    """
    n, k = rows_of(ours)
    sample = sample_rows(n)
    found, real = plain_rows(ours, sample), plain_rows(original, sample)
    rows, columns = torch.ones(len(sample)), torch.ones(k)
    for _ in range(3):
        scaled = real * rows.unsqueeze(1)
        columns = _ratio((found * scaled).sum(0), scaled.square().sum(0))
        scaled = real * columns
        rows = _ratio((found * scaled).sum(1), scaled.square().sum(1))
    middle = float(rows.median().clamp_min(_TINY))
    columns = columns * middle
    all_rows = torch.ones(n)
    for part in slices(n, k):
        scaled = plain_rows(original, part) * columns
        all_rows[part] = _ratio((plain_rows(ours, part) * scaled).sum(1), scaled.square().sum(1))
    return Scaling(all_rows, columns)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Factors, all positive: columns that were rounded to zeros have none of their own."""
    return torch.where(below > _TINY, above / below.clamp_min(_TINY), 1.0).clamp_min(_LEAST)


def spread_of(factors: Tensor) -> float:
    """How much factors differ: the standard deviation of the logarithms of the positive ones, the ends left out."""
    logs = factors[factors > _LEAST].log().sort().values
    cut = len(logs) // 20
    logs = logs[cut : len(logs) - cut]
    return float(logs.std()) if logs.numel() > 1 else 0.0


def far_from_one(factors: Tensor) -> float:
    """How far factors are from 1: how much they differ, or what they have in common."""
    positive = factors[factors > _LEAST]
    common = abs(float(positive.median().log())) if positive.numel() else 0.0
    return max(spread_of(factors), common)
