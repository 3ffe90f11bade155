"""What happened while decoding: counts and times of one request, or the sum of many."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import mul
from typing import Any, NamedTuple

import numpy as np

_HISTOGRAMS = ("drafted_at", "accepted_at", "rejected_at", "draft_lengths")


@dataclass
class Metrics:
    """Counts are exact; times are seconds. Metrics add up: `total(list)` is the same figures over many requests.

    rounds, gained   rounds of drafting and verifying, and the tokens that came from them.
    drafted_at, accepted_at  drafted and accepted tokens by depth in the draft (0: right after the text).
    rejected_at      drafts by the depth at which no token was accepted, as far as they had one there.
    draft_lengths    rounds by the number of tokens that they drafted (0 tokens first): the γ that were chosen.
    target_forwards, target_rows  per request: forwards of the target after the prompt that it took part in, and its
                     rows in them.
    draft_seconds, target_seconds, seconds  a request's share of its rounds' wall time: a round of N requests gives
                     each an N-th, so that sums over requests are wall times. Target time includes verifying.
                     `seconds` covers the prompt too, which alone took `prompt_seconds`.
    first_seconds, first_drafted  the part of `draft_seconds` that went until a request's first drafted tokens were
                     there, and those tokens: a draft model reads the prompt in it.
    reused_tokens    tokens of the prompt whose keys and values were in the cache already.
    preemptions      how often a request gave its pages back for others and was read again later.
    arrivals         for each request, when each of its new tokens came, counted from the request's start. Tokens of one
                     round come together.
    queue_seconds    from when a request came until it was begun.
    forced, forced_accepted  drafted and accepted tokens that a grammar forced; they count above as well.
    drafter_faults   what drafters failed with, and how often; these texts went on without a draft.
    kv_bytes         what the keys and values of the texts take in the target's cache when each is at its longest.
    """

    requests: int = 0
    prompt_tokens: int = 0
    rounds: int = 0
    gained: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rejected_at: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    target_forwards: int = 0
    target_rows: int = 0
    draft_seconds: float = 0.0
    first_seconds: float = 0.0
    first_drafted: int = 0
    target_seconds: float = 0.0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    reused_tokens: int = 0
    preemptions: int = 0
    arrivals: list[list[float]] = field(default_factory=list)
    kv_bytes: int = 0
    queue_seconds: float = 0.0
    forced: int = 0
    forced_accepted: int = 0
    drafter_faults: Counter[str] = field(default_factory=Counter)

    @property
    def new_tokens(self) -> int:
        """Tokens that the requests gained, the first one (which comes from the prompt's own forward) included."""
        return sum(len(times) for times in self.arrivals)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens that entered the text."""
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """α: accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of drafts that are accepted up to each depth, or further, were all of them that long.

        Drafts are of different lengths, and long ones are those that go well: so each depth counts as the share of
        those that came to be judged there, and the shares are multiplied (Kaplan and Meier's estimate of survival).
        """
        shares = [
            hit / (hit + missed) if hit else 0.0
            for hit, missed in itertools.zip_longest(self.accepted_at, self.rejected_at, fillvalue=0)
        ]
        return list(itertools.accumulate(shares, mul))

    @property
    def per_token_acceptance(self) -> float | None:
        """p: of drafted tokens that followed accepted ones, and so came to be judged, the share accepted; None without
        any. What explains the counts best, were each token accepted independently."""
        judged = self.accepted + sum(self.rejected_at)
        return self.accepted / judged if judged else None

    @property
    def tokens_per_round(self) -> float | None:
        """τ: tokens gained a round; None without rounds."""
        return self.gained / self.rounds if self.rounds else None

    @property
    def mean_draft_length(self) -> float | None:
        """γ: tokens drafted a round, on average; None without rounds."""
        return self.drafted / self.rounds if self.rounds else None

    @property
    def step_seconds(self) -> float | None:
        """Target time a round: of plain decoding, what a step of width 1 costs; None without rounds."""
        return self.target_seconds / self.rounds if self.rounds else None

    @property
    def mean_width(self) -> float | None:
        """Rows of one request in one target forward after the prompt; 1 for plain decoding."""
        return self.target_rows / self.target_forwards if self.target_forwards else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens over all the time, the prompt's included."""
        return self.new_tokens / self.seconds if self.seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens gained in rounds over the time of the rounds."""
        spent = self.seconds - self.prompt_seconds
        return self.gained / spent if spent > 0 and self.gained else None

    @property
    def first_token_seconds(self) -> float | None:
        """Mean time to the first token over the requests."""
        return float(np.mean([times[0] for times in self.arrivals if times])) if any(self.arrivals) else None

    @property
    def latency_seconds(self) -> float | None:
        """Mean time to the last token over the requests."""
        return float(np.mean([times[-1] for times in self.arrivals if times])) if any(self.arrivals) else None

    def inter_token_seconds(self) -> dict[str, float | None]:
        """Percentiles p50, p90 and p99 of the time between a token and the one before it; 0 within a round."""
        gaps = [b - a for times in self.arrivals for a, b in itertools.pairwise(times)]
        return {f"p{p}": float(np.percentile(gaps, p)) if gaps else None for p in (50, 90, 99)}

    def draft_cost_ratio(self, step_seconds: float) -> float | None:
        """c: all draft time per drafted token over a target step of width 1; None where nothing was drafted."""
        return self.draft_seconds / self.drafted / step_seconds if self.drafted else None

    def draft_step_ratio(self, step_seconds: float) -> float | None:
        """A draft step alone: c without the first drafts, which read the prompts; None where there are no others."""
        tokens = self.drafted - self.first_drafted
        return (self.draft_seconds - self.first_seconds) / tokens / step_seconds if tokens else None

    def count_draft(self, depths: list[int], accepted: list[int], judged: bool = True) -> None:
        """Records one draft: the depth of each drafted and of each accepted token.

        judged  whether what follows the accepted ones was not accepted; otherwise the text ended with them.
        """
        if not depths and self.draft_lengths:
            self.draft_lengths[0] += 1
            return
        _count(self.draft_lengths, (len(depths),))
        _count(self.drafted_at, depths)
        _count(self.accepted_at, accepted)
        if (lacking := len(self.drafted_at) - len(self.accepted_at)) > 0:
            self.accepted_at += [0] * lacking
        if judged and len(accepted) <= max(depths, default=-1):
            _count(self.rejected_at, (len(accepted),))

    def report(self) -> dict[str, Any]:
        """The keys of report.json's `speed` entries that one run gives; times in milliseconds."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "ttft_ms": _milliseconds(self.first_token_seconds),
            "itl_ms": {key: _milliseconds(value) for key, value in self.inter_token_seconds().items()},
            "latency_ms": _milliseconds(self.latency_seconds),
            "mean_width": self.mean_width,
        }

    def summary(self) -> list[tuple[str, str]]:
        """The figures as labels and texts, for a table; a figure that there is not is "-"."""
        chosen = ", ".join(f"{length}: {count}" for length, count in enumerate(self.draft_lengths) if count)
        times = [f"{key} {_show(_milliseconds(s), '.1f', ' ms')}" for key, s in self.inter_token_seconds().items()]
        speed = _show(self.tokens_per_second, ".1f")
        return [
            ("α accepted / drafted", f"{_show(self.acceptance_rate, '.3f')} ({self.accepted} / {self.drafted})"),
            ("accepted by position", " ".join(f"{share:.2f}" for share in self.accepted_by_position) or "-"),
            ("τ tokens a round", _show(self.tokens_per_round, ".2f")),
            ("γ drafted a round", f"{_show(self.mean_draft_length, '.2f')} (rounds by γ: {chosen or 'none'})"),
            ("tokens/s", f"{speed} ({self.new_tokens} tokens, prompt included in the time)"),
            ("first token", _show(_milliseconds(self.first_token_seconds), ".1f", " ms")),
            ("between tokens", ", ".join(times)),
            ("draft and target time", f"{self.draft_seconds:.2f} s and {self.target_seconds:.2f} s"),
            ("mean target width", _show(self.mean_width, ".2f")),
            ("keys and values", f"{self.kv_bytes / 1e6:.2f} MB"),
        ]


class Counts(NamedTuple):
    """Requests and pages of an engine; both numbers of pages are 0 where the cache has none."""

    running: int
    waiting: int
    pages_used: int
    pages_free: int


def _count(histogram: list[int], places: Sequence[int]) -> None:
    if places and (lacking := max(places) + 1 - len(histogram)) > 0:
        histogram += [0] * lacking
    for place in places:
        histogram[place] += 1


def predicted_speedup(tokens_per_round: float, draft_length: float, draft_cost: float, width_cost: float) -> float:
    """τ / (γc + v): the speed over plain decoding of the same target (after Leviathan et al., 2211.17192).

    draft_cost, width_cost  c and v: a draft step, and a target forward at width γ + 1, over one at width 1.
    """
    return tokens_per_round / (draft_length * draft_cost + width_cost)


def total(parts: list[Metrics]) -> Metrics:
    """The sum over requests."""
    out = Metrics()
    for part in parts:
        for item in fields(Metrics):
            ours, theirs = getattr(out, item.name), getattr(part, item.name)
            if item.name in _HISTOGRAMS:
                setattr(out, item.name, [sum(counts) for counts in itertools.zip_longest(ours, theirs, fillvalue=0)])
            else:
                setattr(out, item.name, ours + theirs)
    return out


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _show(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


class Clock:
    """Seconds since it was made, without the pauses: the time that a stream's reader takes is not decoding time."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._paused_at: float | None = None

    def now(self) -> float:
        return (self._paused_at if self._paused_at is not None else time.perf_counter()) - self._zero

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._zero += time.perf_counter() - self._paused_at
            self._paused_at = None
