"""What a draft step and a wide target forward cost over a target forward of one token, in interleaved medians."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.rows import CacheKind, Decoder, Rows

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
    """Median milliseconds of one forward: the target's by width, the draft's at width 1 (None: no draft model)."""

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

    def __init__(self, model: HasDecoder, text: Sequence[int], kind: CacheKind = "float32") -> None:
        self.decoder, self.text = model.decoder, text
        self.cache = model.decoder.new_cache(kind)
        self.handle = self.cache.open(len(text) + max(WIDTHS) + 1)
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


def measure_costs(
    target: HasDecoder, draft: HasDecoder | None, text: Sequence[int], draft_length: int, seconds: float
) -> StepCosts:
    """Times the target at several widths (γ + 1 among them) and the draft at width 1 after the same `text`.

    Every repeat times each of them once, so that a machine that changes its pace changes all alike. At most 41 repeats;
    fewer, but at least 3, once `seconds` are spent. Widths that the target has no positions for are left out.
    """
    room = target.decoder.max_positions - len(text)
    widths = sorted(width for width in {*WIDTHS, draft_length + 1} if width <= room)
    target_probe = _Probe(target, text, target.decoder.kv.kind)
    tasks: dict[int, Callable[[], float]] = {w: (lambda w=w: target_probe.milliseconds(w)) for w in widths}  # type: ignore[misc]
    if draft is not None:
        draft_probe = _Probe(draft, text)
        tasks[0] = lambda: draft_probe.milliseconds(1)
    for task in tasks.values():
        task()
    times: dict[int, list[float]] = {key: [] for key in tasks}
    started = time.perf_counter()
    repeats = 0
    while repeats < _REPEATS and (repeats < _LEAST_REPEATS or time.perf_counter() - started < seconds):
        for key, task in tasks.items():
            times[key].append(task())
        repeats += 1
    medians = {key: statistics.median(values) for key, values in times.items()}
    target_ms = {width: medians[width] for width in widths}
    ratios = {width: spent / target_ms[1] for width, spent in target_ms.items()}
    return StepCosts(len(text), target_ms, medians.get(0), repeats, ratios)


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
