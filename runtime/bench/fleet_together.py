"""How fast a machine is now, and what replicas on it cost each other: by two streams of texts that they write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np

from runtime.bench.fleet import Fleet, Load, simulate
from runtime.bench.fleet_ask import Timed, after_a_pause, ask, random_prompts, shared_prompts
from runtime.bench.fleet_figures import Figures, wavering
from runtime.bench.load import arrivals

_PROMPT = 16  # tokens of single texts
_STREAM = 24  # texts of a stream
_THIN, _DENSE = 0.3, 0.6  # what share of the cores streams should keep at work
_LEAST, _MOST = 0.3, 8.0  # what is believed of a pace, and of replicas that crowd each other
_STEPS, _STEP, _RUNS = 10, 0.7, 2  # of the search for both; runs of each simulation in it


@dataclass(frozen=True)
class Stream:
    """Texts that came by a load's rate, and the seconds that they took in the mean."""

    load: Load
    seconds: float


@dataclass(frozen=True)
class Together:
    """What a cluster's replicas did on one machine, in each pass; see `write_together`.

    alone  seconds between two tokens of one text; at_once: in the mean of texts that came at once, one a replica.
    thin, dense  streams, in which texts are seldom, and mostly, beside others.
    """

    alone: tuple[float, ...]
    at_once: tuple[float, ...]
    thin: tuple[Stream, ...]
    dense: tuple[Stream, ...]


def write_together(address: str, replicas: int, cores: float, like: Load, passes: int = 10) -> Together:
    """Has an idle cluster's replicas, all on this machine of so many cores, write texts alone, at once and in streams.

    like  the load whose prompts and texts the streams have; its rate and requests do not matter.

    Raises UserError where nothing answers there, or a request is refused.
    """
    generator = np.random.default_rng()  # no earlier stream left its prompts in the cache
    seen = Together((), (), (), ())
    for _ in range(passes):
        alone = _gap(after_a_pause(address, random_prompts(generator, 1, _PROMPT, like.new_tokens)))
        at_once = _gap(after_a_pause(address, random_prompts(generator, replicas, _PROMPT, like.new_tokens)))
        able = min(replicas, cores) / (like.new_tokens * (seen.alone or [alone])[0])
        thin, dense = (
            _stream(address, replace(like, rate=share * able, requests=_STREAM, seed=int(generator.integers(2**31))))
            for share in (_THIN, _DENSE)
        )
        seen = Together((*seen.alone, alone), (*seen.at_once, at_once), (*seen.thin, thin), (*seen.dense, dense))
    return seen


def together(one: Figures, fleet: Fleet, seen: Together) -> Figures:
    """One replica's figures at the pace that the machine had meanwhile, and crowded as replicas crowded each other.

    With both, the simulation takes as long for the streams as the cluster did. Streams and not single texts tell the
    pace: caches that requests and news have used since are no longer the text's, which no single text shows.
    """
    now = replace(one, crowd=(1.0,), waver=(wavering(seen.alone),))
    if fleet.replicas > 1:
        now = replace(now, waver=(*now.waver, wavering(seen.at_once)))
    now = replace(now, steady=median(seen.alone) * seen.thin[0].load.new_tokens)
    pace = crowd = 1.0
    for _ in range(_STEPS):
        paced = now.at_pace(pace)
        if fleet.replicas == 1:
            pace = _corrected(pace, _share(paced, fleet, [*seen.thin, *seen.dense]))
        else:
            pace = _corrected(pace, _share(replace(paced, crowd=(1.0, crowd)), fleet, seen.thin))
            paced = now.at_pace(pace)
            crowd = _corrected(crowd, _share(replace(paced, crowd=(1.0, crowd)), fleet, seen.dense))
    return replace(now.at_pace(pace), crowd=(1.0,) if fleet.replicas == 1 else (1.0, crowd))


def _corrected(factor: float, share: float) -> float:
    """What makes times longer by a factor, after a simulation with it took so many times as long as it should.

    Not by all of it: where many wait, times grow faster than the factor.
    """
    return min(_MOST, max(_LEAST, factor * share**-_STEP))


def _share(figures: Figures, fleet: Fleet, streams: Sequence[Stream]) -> float:
    """Simulated over measured seconds of a text, the median of these streams."""
    found = [simulate(figures, fleet, each.load, _RUNS).latency_ms["mean"] / 1e3 for each in streams]
    return median(seconds / each.seconds for seconds, each in zip(found, streams, strict=True))


def _stream(address: str, load: Load) -> Stream:
    texts = ask(address, shared_prompts(load), arrivals(load.rate, load.requests, load.seed))
    return Stream(load, mean(text.last for text in texts))


def _gap(texts: Sequence[Timed]) -> float:
    """Seconds between two tokens, in the mean of these texts."""
    return mean((text.last - text.first) / max(1, text.tokens - 1) for text in texts)
