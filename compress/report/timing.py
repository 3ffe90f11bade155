"""Several ways of decoding the same prompts, timed in turns, and what their texts have in common."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from compress.progress import Progress
from compress.report.schema_speed import Decoding
from runtime.engine.metrics import Metrics, total
from runtime.speculate import Speculator

REPEATS = 3
TIMING_SECONDS = 45.0  # no repeat begins that would take longer; the first one always ends
_WARM_UP_TOKENS = 6


@dataclass
class Timed:
    """All runs of one way of decoding: per repeat and prompt its new tokens and its metrics."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    metrics: list[list[Metrics]] = field(default_factory=list)

    @property
    def overall(self) -> Metrics:
        """The sum over prompts and repeats."""
        return total([m for repeat in self.metrics for m in repeat])

    def median(self, rate: Callable[[Metrics], float | None]) -> float | None:
        """The median over repeats of a figure of all prompts together."""
        found = [value for value in (rate(total(repeat)) for repeat in self.metrics) if value is not None]
        return statistics.median(found) if found else None

    def figures(self) -> Decoding:
        """Rates are medians over the repeats, times are over all runs."""
        rates = {
            "tokens_per_second": self.median(lambda m: m.tokens_per_second),
            "decode_tokens_per_second": self.median(lambda m: m.decode_tokens_per_second),
        }
        return Decoding(**{**self.overall.report(), **rates, "energy_j": None})


def time_interleaved(
    ways: dict[str, Speculator], prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress
) -> dict[str, Timed]:
    """Decodes every prompt greedily in every way, one after the other, in an order that rotates.

    Exactly `new_tokens` each (no stop tokens), after a warm-up. Up to 3 repeats within the time there is.
    """
    names = list(ways)
    for way in ways.values():
        way.generate([prompts[0]], max_new_tokens=_WARM_UP_TOKENS, stop=())
    timed = {name: Timed() for name in names}
    started = time.perf_counter()
    longest = 0.0
    for repeat in range(REPEATS):
        before = time.perf_counter()
        if repeat and before - started + longest > TIMING_SECONDS:
            break
        for one in timed.values():
            one.tokens.append([])
            one.metrics.append([])
        for index, prompt in enumerate(prompts):
            progress("speed", repeat * len(prompts) + index, REPEATS * len(prompts))
            shift = (repeat + index) % len(names)
            for name in names[shift:] + names[:shift]:
                [result] = ways[name].generate([prompt], max_new_tokens=new_tokens, stop=())
                timed[name].tokens[-1].append(result.tokens)
                timed[name].metrics[-1].append(result.metrics)
        longest = max(longest, time.perf_counter() - before)
    progress("speed", REPEATS * len(prompts), REPEATS * len(prompts))
    return timed


def compare(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(tokens compared, positions that differ) of two lists of texts; a missing token differs."""
    compared = mismatches = 0
    for ours, theirs in zip(reference, other, strict=True):
        pairs = list(zip_longest(ours, theirs))
        compared += len(pairs)
        mismatches += sum(a != b for a, b in pairs)
    return compared, mismatches


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float | None:
    """1 − distinct / all n-grams within each text, over all texts (seq-rep-4 of Welleck et al., 1908.04319)."""
    every = distinct = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        every += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / every if every else None
