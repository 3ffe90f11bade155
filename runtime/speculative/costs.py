"""What a wide target forward costs over one of one token, in interleaved medians."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.contract import CacheKind, Decoder, Rows, integers
from runtime.sampling.distribution import argmax_tokens

# Enough widths to interpolate v for every draft length that the advice considers (0..16).
WIDTHS = (1, 2, 3, 5, 9, 17)
_REPEATS, _LEAST_REPEATS = 41, 3


class HasDecoder(Protocol):
    """What `runtime.load` returns, for instance."""

    @property
    def decoder(self) -> Decoder:
        """The model over rows."""


@dataclass(frozen=True)
class StepCosts:
    """Median milliseconds of the target's forwards by width; `widths`: over one of width 1."""

    context: int
    target_ms: dict[int, float]
    repeats: int = 0
    widths: dict[int, float] = field(default_factory=dict)


class _Probe:
    """One model with a text in its cache, from which forwards of any width are timed and rolled back."""

    def __init__(self, model: HasDecoder, text: Sequence[int], widest: int, kind: CacheKind = "float32") -> None:
        self.decoder, self.text = model.decoder, text
        self.cache = model.decoder.new_cache(kind)
        self.handle = self.cache.open(len(text) + widest)
        rows = Rows.chains([(self.handle, 0, len(text))])
        self.decoder.forward(torch.tensor(text), rows, self.cache, torch.tensor([len(text) - 1]))

    def milliseconds(self, width: int) -> float:
        """One forward of `width` rows after the text and the choice of a token after each, as in verifying a draft."""
        following = [self.text[i % len(self.text)] for i in range(width)]
        started = time.perf_counter()
        rows = Rows.chains([(self.handle, len(self.text), width)])
        out = self.decoder.forward(integers(following), rows, self.cache)
        argmax_tokens(out.logits, "probed model")
        self.cache.truncate(self.handle, len(self.text))
        return (time.perf_counter() - started) * 1000


class Prober:
    """Times the target at several widths after one text, a sample at a time.

    Every sample times each width once, so that a machine that changes its pace changes all alike, and right after an
    untimed forward of that width: decoding repeats one width, and a step after a much wider one can cost twice as much
    (caches hold other data, threads fall asleep). Widths that the target has no positions for are left out.
    """

    def __init__(self, target: HasDecoder, text: Sequence[int], draft_length: int) -> None:
        """`draft_length` + 1 is among the widths."""
        room = target.decoder.max_positions - len(text)
        self._context = len(text)
        self._widths = sorted(width for width in {*WIDTHS, draft_length + 1} if width <= room)
        self._probe = _Probe(target, text, self._widths[-1], target.decoder.kv.kind)
        self._times: dict[int, list[float]] = {width: [] for width in self._widths}

    @property
    def samples(self) -> int:
        """Samples taken so far."""
        return len(self._times[self._widths[0]])

    def sample(self) -> None:
        """Times everything once more."""
        for width, times in self._times.items():
            self._probe.milliseconds(width)
            times.append(self._probe.milliseconds(width))

    def costs(self) -> StepCosts:
        """Medians over the samples, of which there must be one."""
        target_ms = {width: statistics.median(times) for width, times in self._times.items()}
        ratios = {width: spent / target_ms[1] for width, spent in target_ms.items()}
        return StepCosts(self._context, target_ms, self.samples, ratios)


def measure_costs(target: HasDecoder, text: Sequence[int], draft_length: int, seconds: float) -> StepCosts:
    """At most 41 samples of a `Prober`; fewer, but at least 3, once `seconds` are spent."""
    prober = Prober(target, text, draft_length)
    started = time.perf_counter()
    while prober.samples < _REPEATS and (prober.samples < _LEAST_REPEATS or time.perf_counter() - started < seconds):
        prober.sample()
    return prober.costs()


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
