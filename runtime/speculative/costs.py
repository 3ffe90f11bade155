"""What a wide target forward costs over one of one token, in interleaved medians."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.contract import HasDecoder, Rows, integers
from runtime.sampling.distribution import argmax_tokens

# Enough widths to interpolate v for every draft length that the advice considers (0..16).
WIDTHS = (1, 2, 3, 5, 9, 17)
_REPEATS, _LEAST_REPEATS = 41, 3
_FIRST_WIDTHS, _FIRST_SECONDS = (1, 2, 3, 5), 2.0
# Untimed forwards before a timed one: until so many milliseconds are spent, at most so many.
_SETTLED, _MOST_SETTLING = 3.0, 8


@dataclass(frozen=True)
class StepCosts:
    """Median milliseconds of the target's forwards by width; `widths`: over one of width 1."""

    context: int
    target_ms: dict[int, float]
    repeats: int = 0
    widths: dict[int, float] = field(default_factory=dict)


class Prober:
    """Times the target at several widths after one text, which its cache is rolled back to, a sample at a time.

    Every sample times each width once, so that a machine that changes its pace changes all alike, and right after
    untimed forwards of that width: decoding repeats one width, and a step after a much wider one can cost twice as much
    (caches hold other data, threads fall asleep). A step of a third of a millisecond is still a sixth slower at the
    second such forward than at the eighth. Widths that the target has no positions for are left out.
    """

    def __init__(
        self, target: HasDecoder, text: Sequence[int], draft_length: int, widths: Sequence[int] = WIDTHS
    ) -> None:
        """`draft_length` + 1 is among the widths."""
        self._decoder, self._text = target.decoder, text
        room = target.decoder.max_positions - len(text)
        widths = sorted(width for width in {*widths, draft_length + 1} if width <= room)
        self._times: dict[int, list[float]] = {width: [] for width in widths}
        self._cache = target.decoder.new_cache(target.decoder.kv.kind)
        self._handle = self._cache.open(len(text) + widths[-1])
        rows = Rows.chains([(self._handle, 0, len(text))])
        self._decoder.forward(integers(text), rows, self._cache, integers([len(text) - 1]))

    @property
    def samples(self) -> int:
        """Samples taken so far."""
        return len(next(iter(self._times.values())))

    def sample(self) -> None:
        """Times everything once more."""
        for width, times in self._times.items():
            spent = self._milliseconds(width)
            for _ in range(_MOST_SETTLING - 1):
                if spent > _SETTLED:
                    break
                spent += self._milliseconds(width)
            times.append(self._milliseconds(width))

    @property
    def times(self) -> dict[int, list[float]]:
        """Milliseconds by width, a figure a sample."""
        return self._times

    def costs(self) -> StepCosts:
        """Medians over the samples, of which there must be one."""
        target_ms = {width: statistics.median(times) for width, times in self._times.items()}
        ratios = {width: spent / target_ms[1] for width, spent in target_ms.items()}
        return StepCosts(len(self._text), target_ms, self.samples, ratios)

    def _milliseconds(self, width: int) -> float:
        """One forward of `width` rows after the text and the choice of a token after each, as in verifying a draft."""
        following = [self._text[i % len(self._text)] for i in range(width)]
        started = time.perf_counter()
        rows = Rows.chains([(self._handle, len(self._text), width)])
        out = self._decoder.forward(integers(following), rows, self._cache)
        argmax_tokens(out.logits, "probed model")
        self._cache.truncate(self._handle, len(self._text))
        return (time.perf_counter() - started) * 1000


def measure_costs(target: HasDecoder, text: Sequence[int], draft_length: int, seconds: float) -> StepCosts:
    """At most 41 samples of a `Prober`; fewer, but at least 3, once `seconds` are spent."""
    prober = Prober(target, text, draft_length)
    started = time.perf_counter()
    while prober.samples < _REPEATS and (prober.samples < _LEAST_REPEATS or time.perf_counter() - started < seconds):
        prober.sample()
    return prober.costs()


def first_costs(target: HasDecoder, text: Sequence[int]) -> dict[int, float]:
    """By a few widths, what a forward takes over one of one row, after one of a text that `text` begins.

    For a controller that is to begin with them (draft_length.Controller): three samples of a dozen forwards, or fewer
    once they have taken two seconds.
    """
    prober, started = Prober(target, text, 0, _FIRST_WIDTHS), time.perf_counter()
    while prober.samples < _LEAST_REPEATS and (not prober.samples or time.perf_counter() - started < _FIRST_SECONDS):
        prober.sample()
    return prober.costs().widths


def width_cost(widths: Mapping[int, float], width: float) -> float:
    """v: the cost of a target forward of `width` rows over one of 1 row, from measured widths.

    Linear between measured widths, and beyond the last one with the slope of the last piece. Width 1 costs 1.
    """
    points = sorted({**widths, 1: 1.0}.items())
    if len(points) == 1:
        return 1.0
    at = min(max(bisect_left([w for w, _ in points], width), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (width - left) / (right - left)
