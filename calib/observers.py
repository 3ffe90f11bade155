"""Ranges of values that an integer type is to hold: min-max, moving average, percentile, mean squared error, entropy.

`min_max` and `observe` look at one tensor; observers (`MinMax`, `MovingAverage`, `Counted`) take batch after batch.
Percentile, mean squared error and entropy are pure functions of a histogram.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Granularity = Literal["tensor", "channel", "token"]
BINS = 2048
# Ranges that are tried: as many parts of the whole one.
_CANDIDATES = 100
# Values (or bins) that are looked at once.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Range:
    """Ends `low` <= 0 <= `high`, float32: () for a tensor, (K,) by channel, (…) by token of x (…, K).

    0 is in every range, because integers hold it exactly and padding relies on that.
    """

    low: Tensor
    high: Tensor

    @property
    def absmax(self) -> Tensor:
        """What a symmetric type has to reach."""
        return torch.maximum(-self.low, self.high)


@dataclass(frozen=True)
class Histogram:
    """Counts of R streams of values: `counts` (R, B) int64 over −span..span; `span`, `low`, `high` (R,) float32.

    `span` is the first largest |x|, doubled as often as it took: then pairs of bins were joined, so that a count is
    never shared out. `low` <= 0 and `high` >= 0 are exact.
    """

    counts: Tensor
    span: Tensor
    low: Tensor
    high: Tensor

    @property
    def edges(self) -> Tensor:
        """(R, B + 1): where bins begin and end."""
        bins = self.counts.shape[1]
        return self.span.unsqueeze(1) * (torch.arange(bins + 1) * (2 / bins) - 1)

    @property
    def centres(self) -> Tensor:
        """(R, B): the middle of each bin."""
        edges = self.edges
        return (edges[:, 1:] + edges[:, :-1]) / 2


Rule = Callable[[Histogram], Range]


class Observer(Protocol):
    """Sees batches x (…, K) of any float dtype, and says which range to hold."""

    def add(self, x: Tensor) -> None:
        """Raises ValueError, having taken in nothing, for an empty batch or values that are NaN or infinite."""

    def range(self) -> Range:
        """Raises ValueError before the first batch."""


def min_max(x: Tensor, granularity: Granularity) -> Range:
    """The ends of x (…, K). Raises ValueError where it is empty or has values that are NaN or infinite."""
    if x.numel() == 0:
        raise ValueError(f"an empty tensor {list(x.shape)} has no range")
    rows = x.detach().reshape(-1, x.shape[-1])
    low, high = torch.aminmax(rows.reshape(-1) if granularity == "tensor" else rows, dim=int(granularity == "token"))
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are NaN or infinite")
    return _shaped(Range(low.float().clamp(max=0), high.float().clamp(min=0)), x, granularity)


def observe(x: Tensor, rule: Rule, granularity: Granularity, bins: int = BINS) -> Range:
    """What `rule` says of x (…, K) alone. Raises ValueError as `min_max` does."""
    if granularity != "token":
        return _shaped(rule(histogram(x, granularity, bins)), x, granularity)
    tokens = x.reshape(-1, x.shape[-1]).split(max(1, _CHUNK // bins))
    parts = [rule(histogram(part, granularity, bins)) for part in tokens]
    joined = Range(torch.cat([part.low for part in parts]), torch.cat([part.high for part in parts]))
    return _shaped(joined, x, granularity)


def _shaped(found: Range, x: Tensor, granularity: Granularity) -> Range:
    shape = {"tensor": torch.Size(), "channel": x.shape[-1:], "token": x.shape[:-1]}[granularity]
    return Range(found.low.view(shape), found.high.view(shape))


def histogram(x: Tensor, granularity: Granularity, bins: int = BINS, before: Histogram | None = None) -> Histogram:
    """The values of x (…, K) counted: one stream for a tensor, K for channels, T for tokens; and those `before`.

    `bins` is a multiple of 4. Memory: 8 bytes a bin and stream, so take fewer bins for many streams. Raises ValueError
    as `min_max` does, and for other streams than before.
    """
    if bins < 4 or bins % 4:
        raise ValueError(f"bins must be a multiple of 4, found {bins}")
    ends = min_max(x, granularity)
    low, high, absmax = ends.low.reshape(-1), ends.high.reshape(-1), ends.absmax.reshape(-1)
    if before is None:
        counts, span = torch.zeros(len(low), bins, dtype=torch.int64), absmax
    elif before.counts.shape == (len(low), bins):
        low, high = torch.minimum(before.low, low), torch.maximum(before.high, high)
        # Zeros alone have no span. They are in a middle bin, which is right at any span.
        counts, span = before.counts.clone(), torch.where(before.span > 0, before.span, absmax)
    else:
        raise ValueError(f"{list(before.counts.shape)} streams and bins cannot take {[len(low), bins]}")
    while bool((wide := absmax > span).any()):
        pairs = counts[wide].view(-1, bins // 2, 2).sum(dim=2)
        counts[wide] = torch.nn.functional.pad(pairs, (bins // 4, bins // 4))
        span = torch.where(wide, span * 2, span)
    # A stream of zeros has no span; any will do.
    unit = torch.where(span > 0, span, 1.0).unsqueeze(1)
    for streams in _streams(x, granularity):
        places = (streams / unit * (bins // 2)).floor_().long().add_(bins // 2).clamp_(0, bins - 1)
        counts.scatter_add_(1, places, torch.ones((), dtype=torch.int64).expand_as(places))
    return Histogram(counts, span, low, high)


def _streams(x: Tensor, granularity: Granularity) -> Iterator[Tensor]:
    """x as (streams, values) float32, some values at a time."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if granularity == "tensor":
        yield from (part.float().unsqueeze(0) for part in rows.reshape(-1).split(_CHUNK))
    elif granularity == "channel":
        yield from (part.float().T for part in rows.split(max(1, _CHUNK // rows.shape[1])))
    else:
        yield rows.float()


def percentile(counted: Histogram, share: float = 0.9999) -> Range:
    """The range that holds `share` of the values, to the width of a bin; what is left out is split over both ends.

    Raises ValueError for a share that is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share lies in (0, 1], found {share}")
    total = counted.counts.sum(dim=1, keepdim=True)
    # Whole values may be left out, never a part of one.
    spare = (total.double() * ((1 - share) / 2) + 1e-9).floor()
    # A bin goes when it and all beyond it hold no more than that.
    below = (counted.counts.cumsum(dim=1) <= spare).sum(dim=1, keepdim=True)
    above = (counted.counts.flip(1).cumsum(dim=1) <= spare).sum(dim=1, keepdim=True)
    edges = counted.edges
    low = edges.gather(1, below.clamp(max=edges.shape[1] - 1)).squeeze(1)
    high = edges.gather(1, (edges.shape[1] - 1 - above).clamp(min=0)).squeeze(1)
    return Range(torch.maximum(low, counted.low).clamp(max=0), torch.minimum(high, counted.high).clamp(min=0))


def mean_squared_error(counted: Histogram, bits: int = 8, symmetric: bool = True) -> Range:
    """The range, shrunk evenly from the whole one, whose `bits`-bit integers are nearest to the values.

    Symmetric integers span −absmax..absmax in 2^bits − 1 steps; others low..high, with 0 among them.
    """
    steps = (1 << bits) - 1
    centres, counts = counted.centres, counted.counts.float()
    whole = Range(counted.low, counted.high)
    low, high = (-whole.absmax, whole.absmax) if symmetric else (whole.low, whole.high)
    best, found = torch.full_like(low, torch.inf), torch.ones_like(low)
    for part in range(_CANDIDATES, 0, -1):
        shrink = part / _CANDIDATES
        scale = ((high - low) * (shrink / steps)).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        least = torch.full_like(scale, -(1 << bits - 1)) if symmetric else (low.unsqueeze(1) * shrink / scale).round()
        codes = (centres / scale).round_().clamp_(least, least + steps)
        error = codes.mul_(scale).sub_(centres).square_().mul_(counts).sum(dim=1)
        better = error < best
        best, found = torch.where(better, error, best), torch.where(better, shrink, found)
    return _within(counted, found * whole.absmax) if symmetric else Range(whole.low * found, whole.high * found)


def entropy(counted: Histogram, bits: int = 8) -> Range:
    """The symmetric range whose `bits`-bit integers tell least apart from the values (KL divergence of |x|).

    Migacz, "8-bit inference with TensorRT" (2017): for each range, what lies beyond it is counted at its end, and the
    counts within are merged into as many levels as the integers have. Raises ValueError where there are fewer bins
    than integers: nothing would be merged.
    """
    half, levels = counted.counts.shape[1] // 2, 1 << bits - 1
    if half < levels:
        raise ValueError(f"{bits} bits need {2 * levels} bins, found {2 * half}")
    sizes = (counted.counts[:, half:] + counted.counts[:, :half].flip(1)).double()
    total = sizes.sum(dim=1, keepdim=True)
    best, found = torch.full((len(sizes),), torch.inf, dtype=torch.float64), torch.zeros(len(sizes), dtype=torch.int64)
    for kept in sorted({*range(half, levels - 1, -max(1, half // (2 * levels))), levels}, reverse=True):
        inside = sizes[:, :kept]
        exact = inside.clone()
        exact[:, -1] += sizes[:, kept:].sum(dim=1)
        level = torch.arange(kept) * levels // kept
        merged, filled = (
            torch.zeros(len(sizes), levels, dtype=torch.float64).index_add_(1, level, values)
            for values in (inside, (inside > 0).double())
        )
        spread = torch.where(inside > 0, (merged / filled.clamp(min=1))[:, level], 0)
        # Half a value where the merged counts have none: an outlier at an empty end is unlikely, not impossible.
        spread = torch.maximum(spread / inside.sum(dim=1, keepdim=True).clamp(min=1), 0.5 / total)
        exact /= total
        divergence = torch.where(exact > 0, exact * (exact / spread).log(), 0).sum(dim=1)
        better = divergence < best
        best, found = torch.where(better, divergence, best), torch.where(better, kept, found)
    return _within(counted, counted.span * (found / half))


def _within(counted: Histogram, absmax: Tensor) -> Range:
    return Range(torch.maximum(counted.low, -absmax), torch.minimum(counted.high, absmax))


class MinMax:
    """The ends of all batches."""

    def __init__(self, granularity: Literal["tensor", "channel"]):
        self.granularity: Granularity = granularity
        self._seen: Range | None = None

    def add(self, x: Tensor) -> None:
        """See `Observer`."""
        new, old = min_max(x, self.granularity), self._seen
        if old is not None:
            new = Range(torch.minimum(old.low, new.low), torch.maximum(old.high, new.high))
        self._seen = new

    def range(self) -> Range:
        """See `Observer`."""
        return _required(self._seen)


class MovingAverage:
    """An exponential moving average of the batches' ends; the first batch starts it."""

    def __init__(self, granularity: Literal["tensor", "channel"], momentum: float = 0.9):
        """`momentum`, in [0, 1), is what is kept of the average at each batch. Raises ValueError for another."""
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum lies in [0, 1), found {momentum}")
        self.granularity: Granularity = granularity
        self.momentum = momentum
        self._average: Range | None = None

    def add(self, x: Tensor) -> None:
        """See `Observer`."""
        new, old = min_max(x, self.granularity), self._average
        if old is not None:
            share = 1 - self.momentum
            new = Range(torch.lerp(old.low, new.low, share), torch.lerp(old.high, new.high, share))
        self._average = new

    def range(self) -> Range:
        """See `Observer`."""
        return _required(self._average)


class Counted:
    """A rule on the histogram of all batches: `percentile`, `mean_squared_error`, `entropy`; `partial` sets options."""

    def __init__(self, rule: Rule, granularity: Literal["tensor", "channel"], bins: int = BINS):
        """Memory: 8 bytes a bin, and that for each channel."""
        self.rule, self.bins = rule, bins
        self.granularity: Granularity = granularity
        self._counted: Histogram | None = None
        self._shape = torch.Size()

    def add(self, x: Tensor) -> None:
        """See `Observer`."""
        self._counted = histogram(x, self.granularity, self.bins, self._counted)
        self._shape = x.shape[-1:] if self.granularity == "channel" else torch.Size()

    def range(self) -> Range:
        """See `Observer`."""
        if self._counted is None:
            return _required(None)
        found = self.rule(self._counted)
        return Range(found.low.view(self._shape), found.high.view(self._shape))


def _required(seen: Range | None) -> Range:
    if seen is None:
        raise ValueError("an observer has a range once it has seen a batch")
    return seen
