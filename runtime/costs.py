"""What a draft step and a wide target forward cost over a target forward of one token, in interleaved medians."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from runtime.kv_kind import CacheKind
from runtime.rows import Decoder, GreedyChains, Rows

# Enough widths to interpolate v for every draft length that the advice considers (0..16).
WIDTHS = (1, 2, 3, 5, 9, 17)
_REPEATS, _LEAST_REPEATS = 41, 3
# The draft's key beside the target's widths.
_DRAFT = 0


class HasDecoder(Protocol):
    """What `runtime.load` returns, for instance."""

    @property
    def decoder(self) -> Decoder:
        """The model over rows."""


@dataclass(frozen=True)
class StepCosts:
    """Median milliseconds: of the target's forwards by width, of a draft model's step (None: no draft model)."""

    context: int
    target_ms: dict[int, float]
    draft_ms: float | None = None
    repeats: int = 0
    widths: dict[int, float] = field(default_factory=dict)

    @property
    def draft_ratio(self) -> float | None:
        """c: a draft step over a target forward at width 1."""
        return None if self.draft_ms is None else self.draft_ms / self.target_ms[1]


class _Probe:
    """One model with a text in its cache, from which forwards of any width are timed and rolled back."""

    def __init__(self, model: HasDecoder, text: Sequence[int], widest: int, kind: CacheKind = "float32") -> None:
        self.decoder, self.text = model.decoder, text
        self.cache = model.decoder.new_cache(kind)
        self.handle = self.cache.open(len(text) + widest)
        rows = Rows.chains([(self.handle, 0, len(text))])
        self.decoder.forward(torch.tensor(text), rows, self.cache, torch.tensor([len(text) - 1]))

    def milliseconds(self, width: int) -> float:
        """One forward of `width` rows after the text, until its logits can be read."""
        tokens = torch.tensor([self.text[i % len(self.text)] for i in range(width)])
        rows = Rows.chains([(self.handle, len(self.text), width)])
        started = time.perf_counter()
        out = self.decoder.forward(tokens, rows, self.cache)
        out.logits[-1].argmax().item()  # on a GPU: waits for the kernels
        spent = time.perf_counter() - started
        self.cache.truncate(self.handle, len(self.text))
        return spent * 1000

    def chain_milliseconds(self, decoder: GreedyChains, steps: int) -> float:
        """A step of a greedy draft of so many tokens that is made in one call, catching up with one token included."""
        length = len(self.text)
        tokens, rows = torch.tensor(self.text[-1:]), Rows.chains([(self.handle, length, 1)])
        started = time.perf_counter()
        decoder.continue_greedy(tokens, rows, self.cache, [steps], self.decoder.vocab_size)
        spent = time.perf_counter() - started
        self.cache.truncate(self.handle, length)
        return spent * 1000 / steps


class Prober:
    """Times the target at several widths and a step of the draft after one text, a sample at a time.

    Every sample times each of them once, so that a machine that changes its pace changes all alike. Widths that the
    target has no positions for are left out.
    """

    def __init__(
        self, target: HasDecoder, draft: HasDecoder | None, text: Sequence[int], draft_length: int, chains: bool = True
    ) -> None:
        """`draft_length` + 1 is among the widths. The first forwards, which are slow, are not counted.

        `chains`: whether the drafter takes a round's tokens from one call where the draft's decoder offers that, as it
        does for greedy texts. A step is then timed as a share of such a call, which spares what single steps spend
        between forwards.
        """
        room = target.decoder.max_positions - len(text)
        self._context = len(text)
        self._widths = sorted(width for width in {*WIDTHS, draft_length + 1} if width <= room)
        probe = _Probe(target, text, self._widths[-1], target.decoder.kv.kind)
        self._tasks: dict[int, Callable[[], float]] = {w: partial(probe.milliseconds, w) for w in self._widths}
        if draft is not None:
            steps = max(1, min(draft_length, draft.decoder.max_positions - len(text)))
            drafting = _Probe(draft, text, steps)
            self._tasks[_DRAFT] = partial(drafting.milliseconds, 1)
            if chains and isinstance(draft.decoder, GreedyChains):
                self._tasks[_DRAFT] = partial(drafting.chain_milliseconds, draft.decoder, steps)
        for task in self._tasks.values():
            task()
        self._times: dict[int, list[float]] = {key: [] for key in self._tasks}

    @property
    def samples(self) -> int:
        """Samples taken so far."""
        return len(self._times[self._widths[0]])

    def sample(self) -> None:
        """Times everything once more."""
        for key, task in self._tasks.items():
            self._times[key].append(task())

    def costs(self) -> StepCosts:
        """Medians over the samples, of which there must be one."""
        medians = {key: statistics.median(values) for key, values in self._times.items()}
        target_ms = {width: medians[width] for width in self._widths}
        ratios = {width: spent / target_ms[1] for width, spent in target_ms.items()}
        return StepCosts(self._context, target_ms, medians.get(_DRAFT), self.samples, ratios)


def measure_costs(
    target: HasDecoder, draft: HasDecoder | None, text: Sequence[int], draft_length: int, seconds: float
) -> StepCosts:
    """At most 41 samples of a `Prober`; fewer, but at least 3, once `seconds` are spent."""
    prober = Prober(target, draft, text, draft_length)
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
