"""Several ways of decoding the same prompts, timed in turns, and what their texts have in common."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from compress.progress import Progress
from compress.report.schema_speed import Decoding
from runtime.engine.metrics import Metrics, total
from runtime.speculate import Speculator

REPEATS = 3
TIMING_SECONDS = 45.0  # no repeat begins that would take longer; the first one always ends
_WARM_UP_TOKENS = 6


@dataclass(frozen=True)
class Work:
    """What is decoded in every way: token lists, `new_tokens` more of each, how often, and in what time."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    repeats: int = REPEATS
    seconds: float = TIMING_SECONDS


@dataclass
class Timed:
    """All runs of one way of decoding: per repeat and prompt its new tokens and its metrics."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    metrics: list[list[Metrics]] = field(default_factory=list)

    @property
    def overall(self) -> Metrics:
        """The sum over prompts and repeats: how good drafts were."""
        return total([m for repeat in self.metrics for m in repeat])

    @property
    def typical(self) -> Metrics:
        """The sum over the runs that `seconds` is of, each prompt's of median time: what explains that time.

        Other repeats can differ: where γ is chosen, the first one tries drafts that the later ones do without.
        """
        by_prompt = zip(*self.metrics, strict=True)
        return total([sorted(runs, key=lambda m: m.seconds)[(len(runs) - 1) // 2] for runs in by_prompt])

    @property
    def seconds(self) -> float:
        """Of all prompts once: of each its median over the repeats (the lower of two), so that what disturbed some of
        them counts for nothing."""
        return self.typical.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Over all the time, the prompts' included."""
        return self.typical.tokens_per_second

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens gained in rounds over the time of the rounds."""
        return self.typical.decode_tokens_per_second

    def only(self, places: Sequence[int]) -> "Timed":
        """The same of some of the prompts."""
        return Timed(
            [[repeat[i] for i in places] for repeat in self.tokens],
            [[repeat[i] for i in places] for repeat in self.metrics],
        )

    def figures(self) -> Decoding:
        """Rates are of each prompt's median time over the repeats, other times over all runs."""
        rates = {
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
        return Decoding(**{**self.overall.report(), **rates, "energy_j": None})


def time_interleaved(ways: Mapping[str, Speculator], work: Work, progress: Progress) -> dict[str, Timed]:
    """Decodes every prompt greedily in every way, one after the other, in an order that is shuffled for each prompt.

    Who comes after a larger model finds the processor's caches full of it, so nobody always comes after the same one.
    Exactly `new_tokens` each (no stop tokens), after a warm-up. As many of the repeats as there is time for.
    """
    names, prompts, repeats = list(ways), work.prompts, work.repeats
    chooser = random.Random(0)
    for way in ways.values():
        way.generate([prompts[0]], max_new_tokens=min(work.new_tokens, _WARM_UP_TOKENS), stop=())
    timed = {name: Timed() for name in names}
    started = time.perf_counter()
    longest = 0.0
    for repeat in range(repeats):
        before = time.perf_counter()
        if repeat and before - started + longest > work.seconds:
            break
        for one in timed.values():
            one.tokens.append([])
            one.metrics.append([])
        for index, prompt in enumerate(prompts):
            progress("speed", repeat * len(prompts) + index, repeats * len(prompts))
            chooser.shuffle(names)
            for name in names:
                [result] = ways[name].generate([prompt], max_new_tokens=work.new_tokens, stop=())
                timed[name].tokens[-1].append(result.tokens)
                timed[name].metrics[-1].append(result.metrics)
        longest = max(longest, time.perf_counter() - before)
    progress("speed", repeats * len(prompts), repeats * len(prompts))
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
