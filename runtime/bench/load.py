"""Open-loop load: requests come when they come (a Poisson process), whether or not the engine keeps up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import numpy as np

from runtime.bench.speculate import Job, Way, percentiles, run_once

# Steps of the search between a rate that held and one that did not.
_BISECTIONS = 4
_MOST_DOUBLINGS = 10
# Seconds in which the requests of one run have to come.
LONGEST = 3600


@dataclass(frozen=True)
class Served:
    """One run at one rate. Milliseconds, from a request's arrival: the wait for a place in the batch counts."""

    rate: float
    requests: int
    requests_per_second: float
    tokens_per_second: float
    latency_ms: dict[str, float | None]
    ttft_ms: dict[str, float | None]
    itl_ms: dict[str, float | None]
    mean_batch: float


@dataclass(frozen=True)
class Bound:
    """What P90 must stay under, in milliseconds; None: no bound."""

    latency_ms: float | None
    ttft_ms: float | None

    def holds(self, served: Served) -> bool:
        """Whether a run stayed under both."""
        return all(
            limit is None or (found["p90"] is not None and found["p90"] <= limit)
            for limit, found in ((self.latency_ms, served.latency_ms), (self.ttft_ms, served.ttft_ms))
        )


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` requests come, `rate` a second on average: exponential gaps."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    found: list[float] = np.cumsum(gaps).tolist()
    return found


def serve(job: Job, way: Way, rate: float, count: int, seed: int) -> Served:
    """`count` requests, the job's prompts in turn, at a rate; returns when the last one has ended."""
    run = run_once(job, way, tuple(islice(cycle(job.items), count)), arrivals(rate, count, seed))
    times = [one.arrivals[0] for one in run.metrics]
    return Served(
        rate=rate,
        requests=count,
        requests_per_second=count / run.seconds,
        tokens_per_second=sum(map(len, times)) / run.seconds,
        latency_ms=percentiles([one[-1] for one in times]),
        ttft_ms=percentiles([one[0] for one in times]),
        itl_ms=percentiles([b - a for one in times for a, b in pairwise(one)]),
        mean_batch=run.mean_batch,
    )


def highest_rate(run: Callable[[float], Served], rate: float, bound: Bound) -> tuple[float | None, Sequence[Served]]:
    """The highest rate that held of those tried (None: none did), and every run.

    Doubles while the bound holds, or halves until it does, and then bisects. Requests that never meet are as fast at
    any lower rate, and where the bound breaks with them nothing lower is tried.
    """
    tried: list[Served] = []
    held: float | None = None
    broke: float | None = None

    def attempt(at: float) -> None:
        nonlocal held, broke
        tried.append(run(at))
        if bound.holds(tried[-1]):
            held = at
        else:
            broke = at

    attempt(rate)
    while (held is None or broke is None) and len(tried) <= _MOST_DOUBLINGS:
        if held is None and (tried[-1].mean_batch == 1 or 2 * tried[-1].requests / tried[-1].rate > LONGEST):
            break
        attempt(2 * held if held is not None else tried[-1].rate / 2)
    if held is not None and broke is not None:
        for _ in range(_BISECTIONS):
            attempt((held + broke) / 2)
    return held, tried
