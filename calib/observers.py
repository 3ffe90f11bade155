"""How far the codes of a layer's inputs are to reach, where one static range serves every text.

An observer takes batch after batch and then names the largest |x| that is not clipped, for integers that are symmetric
about zero. Min-max and the moving average, which the first batch starts, keep one number; percentile, squared error and
entropy are pure functions of a histogram of |x|. Memory does not grow with the text (`BINS`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

BINS = 2048
# Ranges that the squared error is computed for: as many parts of the whole one.
_CANDIDATES = 100
# What a moving average keeps at each batch.
_MOMENTUM = 0.9
# Values that are counted at once.
_CHUNK = 1 << 22

S = TypeVar("S")


@dataclass(frozen=True)
class Histogram:
    """Counts of |x|: `counts` (B,) int64 over 0..span; `highest` is the largest |x| exactly.

    `span` is the first batch's largest |x|, doubled as often as it took: then pairs of bins were joined, so that no
    count is ever shared out.
    """

    counts: Tensor
    span: float
    highest: float

    @property
    def centres(self) -> Tensor:
        """(B,) float64: the middle of each bin."""
        return (torch.arange(len(self.counts), dtype=torch.float64) + 0.5) * (self.span / len(self.counts))


def largest(x: Tensor) -> float:
    """The largest |x|. Raises ValueError where x is empty or has values that are NaN or infinite."""
    if x.numel() == 0:
        raise ValueError(f"an empty tensor {list(x.shape)} has no range")
    low, high = torch.aminmax(x.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are NaN or infinite")
    return max(-float(low), float(high), 0.0)


def histogram(x: Tensor, before: Histogram | None = None, bins: int = BINS) -> Histogram:
    """The values of x counted, with those `before`. `bins` is even. Raises ValueError as `largest` does."""
    highest = largest(x)
    if before is None:
        before = Histogram(torch.zeros(bins, dtype=torch.int64), 0.0, 0.0)
    # Zeros alone have no span. They are in the first bin, which is right at any span.
    counts, bins, span = before.counts.clone(), len(before.counts), before.span or highest
    while highest > span:
        counts = torch.nn.functional.pad(counts.view(-1, 2).sum(dim=1), (0, bins // 2))
        span *= 2
    for part in x.detach().reshape(-1).split(_CHUNK):
        places = (part.float().abs() / (span or 1.0) * bins).long().clamp_(max=bins - 1)
        counts += torch.bincount(places, minlength=bins)
    return Histogram(counts, span, max(highest, before.highest))


def percentile(found: Histogram, share: float = 0.9999) -> float:
    """The range that holds `share` of the values, to the width of a bin. Raises ValueError outside of (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"a share lies in (0, 1], found {share}")
    # Whole values may be left out, never a part of one; a bin goes when it and all beyond it hold no more than that.
    spare = int(int(found.counts.sum()) * (1 - share) + 1e-9)
    beyond = int((found.counts.flip(0).cumsum(dim=0) <= spare).sum())
    kept = len(found.counts) - beyond
    return min(found.highest, kept * found.span / len(found.counts))


def mean_squared_error(found: Histogram, limit: int = 127) -> float:
    """The range, a part of the whole one, whose codes −limit..limit are nearest to the values; of equals the widest."""
    centres = found.centres
    ranges = found.highest * torch.arange(_CANDIDATES, 0, -1, dtype=torch.float64) / _CANDIDATES
    scales = (ranges / limit).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes = (centres / scales).round_().clamp_(max=limit)
    errors = (codes.mul_(scales).sub_(centres).square_() * found.counts).sum(dim=1)
    return float(ranges[int((errors == errors.min()).nonzero()[0])])


def entropy(found: Histogram, levels: int = 128) -> float:
    """The range whose `levels` sizes of a code tell least apart from the values (KL divergence of |x|).

    Migacz, "8-bit inference with TensorRT" (2017): for each range, what lies beyond it is counted at its end, and the
    counts within are merged into as many levels as the integers have. Raises ValueError where there are fewer bins than
    levels: nothing would be merged.
    """
    sizes, bins = found.counts.double(), len(found.counts)
    if bins < levels:
        raise ValueError(f"{levels} levels need as many bins, found {bins}")
    total = sizes.sum()
    best, range_ = torch.inf, bins
    for kept in sorted({*range(bins, levels - 1, -max(1, bins // (2 * levels))), levels}, reverse=True):
        inside = sizes[:kept]
        exact = inside.clone()
        exact[-1] += sizes[kept:].sum()
        level = torch.arange(kept) * levels // kept
        merged, filled = (
            torch.zeros(levels, dtype=torch.float64).index_add_(0, level, values)
            for values in (inside, (inside > 0).double())
        )
        spread = torch.where(inside > 0, (merged / filled.clamp(min=1))[level], 0)
        # Half a value where the merged counts have none: an outlier at an empty end is unlikely, not impossible.
        spread = torch.maximum(spread / inside.sum().clamp(min=1), 0.5 / total)
        exact /= total
        divergence = float(torch.where(exact > 0, exact * (exact / spread).log(), 0).sum())
        if divergence < best:
            best, range_ = divergence, kept
    return min(found.highest, found.span * range_ / bins)


class Observer(Generic[S]):
    """Sees batches x of any shape and float dtype.

    take  a batch, and what came of those before (None: it is the first) → what comes of both.
    tell  the range of that.
    """

    def __init__(self, take: Callable[[Tensor, S | None], S], tell: Callable[[S], float]) -> None:
        self._take, self._tell = take, tell
        self._seen: S | None = None

    def add(self, x: Tensor) -> None:
        """Raises ValueError, having taken in nothing, for an empty batch or values that are NaN or infinite."""
        self._seen = self._take(x, self._seen)

    def absmax(self) -> float:
        """What the last code stands for. Raises ValueError before the first batch."""
        if self._seen is None:
            raise ValueError("an observer has a range once it has seen a batch")
        return self._tell(self._seen)


def _highest(x: Tensor, before: float | None) -> float:
    return max(largest(x), before or 0.0)


def _average(x: Tensor, before: float | None) -> float:
    new = largest(x)
    return new if before is None else _MOMENTUM * before + (1 - _MOMENTUM) * new


# By the names that recipes have for them.
OBSERVERS: dict[str, Callable[[], Observer[Any]]] = {
    "minmax": partial(Observer, _highest, float),
    "moving_average": partial(Observer, _average, float),
    "percentile": partial(Observer, histogram, percentile),
    "mse": partial(Observer, histogram, mean_squared_error),
    "entropy": partial(Observer, histogram, entropy),
}
