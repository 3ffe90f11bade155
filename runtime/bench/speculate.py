"""Decoding with and without speculation, in turns: how much faster, how near to what costs predict, what differs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from runtime.contract import Cache, Decoder
from runtime.engine.drafting import GRAMMAR
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics, predicted_speedup, total
from runtime.sampling.params import Sampling
from runtime.speculative.costs import StepCosts, width_cost
from runtime.speculative.draft import Drafter, NoDrafter, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.verify import Rule

if TYPE_CHECKING:
    from runtime.sampling.grammar import Grammar


@dataclass(frozen=True)
class Item:
    """A prompt as token ids, and its group."""

    tokens: list[int]
    group: str


@dataclass(frozen=True)
class Job:
    """What all passes share. `draft_length` None: a controller chooses, which begins with the costs `widths`.

    grammar  what each text keeps to.
    """

    decoder: Decoder
    drafter: Drafter
    items: tuple[Item, ...]
    new_tokens: int
    batch: int
    sampling: Sampling
    rule: Rule
    draft_length: int | None
    stop: frozenset[int] = frozenset()
    grammar: "Grammar | None" = None
    widths: Mapping[int, float] = field(default_factory=dict)


class GrammarDrafter(NoDrafter):
    """Drafts nothing itself: the engine drafts what a grammar forces."""

    name = GRAMMAR


@dataclass(frozen=True)
class Pass:
    """All prompts once: wall seconds, requests in a step on average, and per prompt the counts and the new tokens."""

    seconds: float
    mean_batch: float
    metrics: list[Metrics]
    tokens: list[list[int]]


@dataclass
class Way:
    """Plain or speculative decoding: its γ (a controller learns across passes), cache and passes."""

    drafter: Drafter
    draft_length: int | Controller
    cache: Cache
    passes: list[Pass] = field(default_factory=list)

    @property
    def counts(self) -> Metrics:
        """The sum over all passes and prompts."""
        return total([m for one in self.passes for m in one.metrics])

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each pass."""
        return [sum(map(len, one.tokens)) / one.seconds for one in self.passes]


def run_once(
    job: Job,
    way: Way,
    items: Sequence[Item] | None = None,
    due: Sequence[float] | None = None,
    in_flight: int | None = None,
) -> Pass:
    """All prompts (or these) through an engine, `batch` at a time; returns when the last one has ended.

    due        seconds after the start at which each comes, rising; None: all are there from the start.
    in_flight  a request comes when fewer than so many have not ended; None: whatever the others do.
    """
    items = job.items if items is None else items
    due = [0.0] * len(items) if due is None else due
    most = len(items) if in_flight is None else in_flight
    engine = Engine(job.decoder, way.drafter, way.draft_length, job.rule, way.cache, max_batch=job.batch)
    requests = [
        Request(i, list(item.tokens), len(item.tokens), job.sampling, job.new_tokens, job.stop)
        for i, item in enumerate(items)
    ]
    if job.grammar is not None:
        for request in requests:
            request.grammar = job.grammar.matcher()
    metrics = [Metrics() for _ in items]
    sent, steps, live = 0, 0, 0
    start = engine.clock.now()
    try:
        while sent < len(items) or engine.busy:
            now = engine.clock.now() - start
            while sent < len(items) and due[sent] <= now and _in_flight(requests[:sent], most) < most:
                # Counted from when it came, not from when the engine had time to look.
                came = start + due[sent] if in_flight is None else engine.clock.now()
                engine.add(requests[sent], metrics[sent], came)
                sent += 1
            if engine.busy:
                live += len(engine.step())
                steps += 1
            else:
                time.sleep(max(0.0, due[sent] - now))
        seconds = engine.clock.now() - start
    finally:
        engine.close()
    return Pass(seconds, live / steps, metrics, [request.new_tokens for request in requests])


def _in_flight(sent: Sequence[Request], most: int) -> int:
    """How many of these have not ended; they need not be counted where all may be there at once."""
    return sum(not request.finished for request in sent) if most <= len(sent) else 0


def ways(job: Job) -> tuple[Way, Way]:
    """Without and with speculation, in one cache."""
    cache = job.decoder.new_cache()
    length: int | Controller = Controller(widths=job.widths) if job.draft_length is None else job.draft_length
    return Way(NoDrafter(), 0, cache), Way(job.drafter, length, cache)


def measure(
    job: Job, rounds: int, say: Callable[[str], None], between: Callable[[Sequence[int]], None] | None = None
) -> tuple[Way, Way]:
    """`rounds` passes without and with speculation, in turns, after one that does not count.

    `between` is called after each of a round's passes with a text as long as the jobs' are half way: what it times, it
    times on the machine as it was then.
    """
    both = ways(job)
    for way in both:
        warm = run_once(job, way, job.items[:2])
    first = job.items[0].tokens + warm.tokens[0]
    middle = first[: len(job.items[0].tokens) + len(warm.tokens[0]) // 2]
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for way in both if number % 2 == 0 else both[::-1]:
            way.passes.append(run_once(job, way))
            if between is not None:
                between(middle)
    return both


def row(job: Job, plain: Way, spoken: Way, costs: StepCosts | None) -> dict[str, Any]:
    """What one run shows; times in milliseconds. A figure that cannot be told is None."""
    counts, base = spoken.counts, plain.counts
    speeds = [a / b for a, b in zip(spoken.tokens_per_second, plain.tokens_per_second, strict=True)]
    pairs = list(zip(plain.passes[0].tokens, spoken.passes[0].tokens, strict=True))
    predicted = _predicted(job, plain, spoken, costs)
    # Speculation may give another text than plain decoding, of the same distribution.
    free = job.rule != "coupled" and not job.sampling.greedy
    return {
        "drafter": job.drafter.name,
        "batch": job.batch,
        "temperature": job.sampling.temperature,
        "verify": "greedy" if job.sampling.greedy else job.rule,
        "draft_length": job.draft_length,
        "prompts": len(job.items),
        "new_tokens": sum(map(len, spoken.passes[0].tokens)),
        "rounds": len(spoken.passes),
        "plain": base.report() | {"tokens_per_second": median(plain.tokens_per_second)},
        "speculative": counts.report() | {"tokens_per_second": median(spoken.tokens_per_second)},
        "speedup": median(speeds),
        "decode_speedup": _median(spoken, plain, _decode_ratio),
        "predicted_speedup": predicted,
        # The prompts take the time that they took, and only what follows becomes faster.
        "predicted_with_prompts": None
        if predicted is None
        else base.seconds / (counts.prompt_seconds + (base.seconds - base.prompt_seconds) / predicted),
        "draft_cost_ratio": _median(spoken, plain, _draft_cost),
        # The same of a draft step alone.
        "draft_step_ratio": _median(
            spoken, plain, lambda ours, base: ours.draft_step_ratio(base.step_seconds) if base.step_seconds else None
        ),
        "acceptance_rate": counts.acceptance_rate,
        "tokens_per_round": counts.tokens_per_round,
        "accepted_by_position": counts.accepted_by_position,
        "drafted_per_round": counts.mean_draft_length,
        "draft_ms": counts.draft_seconds * 1e3,
        "target_ms": counts.target_seconds * 1e3,
        "ttft_ms": percentiles([times[0] for times in counts.arrivals if times]),
        "kv_bytes_per_token": spoken.cache.bytes_per_token(),
        "tokens_compared": sum(len(a) for a, _ in pairs),
        "mismatches": None if free else sum(a != b for a, b in pairs),
        "groups": _groups(job, plain, spoken),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 in milliseconds; None of nothing."""
    ordered = sorted(seconds)
    return {
        f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 if ordered else None
        for p in (50, 90, 99)
    }


def _median(spoken: Way, plain: Way, ratio: Callable[[Metrics, Metrics], float | None]) -> float | None:
    """The median ratio of a speculative pass to the plain one beside it: memory's speed changes by the minute."""
    passes = zip(spoken.passes, plain.passes, strict=True)
    found = [value for a, b in passes if (value := ratio(total(a.metrics), total(b.metrics))) is not None]
    return median(found) if found else None


def _decode_ratio(ours: Metrics, base: Metrics) -> float | None:
    """The speed-up without the prompts' time, which the prediction leaves out as well."""
    fast, slow = ours.decode_tokens_per_second, base.decode_tokens_per_second
    return fast / slow if fast and slow else None


def _draft_cost(ours: Metrics, base: Metrics) -> float | None:
    """What proposing took per drafted token, catching up with the text included, over a plain step of the target."""
    return ours.draft_cost_ratio(base.step_seconds) if base.step_seconds else None


def _predicted(job: Job, plain: Way, spoken: Way, costs: StepCosts | None) -> float | None:
    """τ / (γc + v), for one request at a time: γ the mean of what was drafted, v the mean over its forwards."""
    counts = spoken.counts
    c, tau = _median(spoken, plain, _draft_cost), counts.tokens_per_round
    if job.batch > 1 or costs is None or c is None or tau is None:
        return None
    gamma = counts.drafted / counts.rounds
    v = sum(n * width_cost(costs.widths, 1 + length) for length, n in enumerate(counts.draft_lengths)) / counts.rounds
    return predicted_speedup(tau, gamma, c, v)


def _groups(job: Job, plain: Way, spoken: Way) -> list[dict[str, Any]]:
    """Per group of tasks: speed by the requests' own time, and acceptance."""
    out = []
    for name in dict.fromkeys(item.group for item in job.items):
        members = [i for i, item in enumerate(job.items) if item.group == name]
        ours, base = (total([one.metrics[i] for one in way.passes for i in members]) for way in (spoken, plain))
        fast, slow = ours.tokens_per_second, base.tokens_per_second
        out.append(
            {
                "name": name,
                "prompts": len(members),
                "tokens_per_second": fast,
                "speedup": fast / slow if fast and slow else None,
                "acceptance_rate": ours.acceptance_rate,
                "tokens_per_round": ours.tokens_per_round,
            }
        )
    return out
