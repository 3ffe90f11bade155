"""What replicas on one machine cost each other, and how fast the machine is now: by texts that they write together."""

from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np

from runtime.bench.fleet import Fleet, Load, gap, simulate
from runtime.bench.fleet_ask import after_a_pause, ask, mean_gap, random_prompts
from runtime.bench.fleet_figures import Figures, wavering
from runtime.bench.load import arrivals

_PROMPT = 16  # tokens
_STREAM, _BUSY = 24, 0.6  # texts that come one after the other, and what share of the cores they should keep at work
_LEAST, _MOST, _NEAR = 0.5, 8.0, 0.01  # what is believed of replicas that crowd each other, and how exactly it is found


@dataclass(frozen=True)
class Together:
    """What texts of `new_tokens` tokens took in an idle cluster, of each pass; see `write_together`.

    alone    seconds between two tokens of one text; at_once: in the mean of texts that came at once, one a replica.
    stream   seconds of a text in the mean of those that came as `due` says, in seconds.
    """

    new_tokens: int
    alone: tuple[float, ...]
    at_once: tuple[float, ...]
    stream: tuple[float, ...]
    due: tuple[float, ...]


def write_together(address: str, replicas: int, cores: float, new_tokens: int, passes: int = 15) -> Together:
    """Has a cluster's replicas, all on this machine of so many cores, write texts alone, at once and in a stream.

    Raises UserError where nothing answers there, or a request is refused.
    """
    generator = np.random.default_rng()
    alone, at_once, stream, due = [], [], [], list[float]()
    for _ in range(passes):
        alone.append(mean_gap(after_a_pause(address, random_prompts(generator, 1, _PROMPT, new_tokens))))
        if replicas == 1:
            continue
        at_once.append(mean_gap(after_a_pause(address, random_prompts(generator, replicas, _PROMPT, new_tokens))))
        due = due or arrivals(_BUSY * min(replicas, cores) / (new_tokens * alone[0]), _STREAM, 0)
        texts = ask(address, random_prompts(generator, _STREAM, _PROMPT, new_tokens), due)
        stream.append(mean(text.last for text in texts))
    return Together(new_tokens, tuple(alone), tuple(at_once), tuple(stream), tuple(due))


def together(one: Figures, fleet: Fleet, seen: Together) -> Figures:
    """The figures of one replica as they are beside the fleet's others, at the pace that the machine had meanwhile.

    one  what ingress, client and Ray take of the cores while texts are written is no crowding.
    """
    pace = median(seen.alone) / gap(replace(one, crowd=(1.0,)), fleet, 1, _PROMPT, seen.new_tokens)
    now = replace(one.at_pace(pace), waver=(wavering(seen.alone),), steady=seen.new_tokens * median(seen.alone))
    if fleet.replicas == 1:
        return replace(now, crowd=(1.0,))
    return crowded(replace(now, waver=(*now.waver, wavering(seen.at_once))), fleet, seen)


def crowded(one: Figures, fleet: Fleet, seen: Together) -> Figures:
    """With the crowd of two and more replicas with which the stream's texts take what they took: by bisection.

    By a stream and not by texts at once: what is lost where requests come in between shows there alone.
    """
    load, wanted = Load(1.0, len(seen.due), _PROMPT, seen.new_tokens), 1e3 * median(seen.stream)
    low, high = _LEAST, _MOST
    while high - low > _NEAR:
        middle = (low + high) / 2
        found = simulate(replace(one, crowd=(1.0, middle)), fleet, load, seen.due).latency_ms["mean"]
        low, high = (middle, high) if found < wanted else (low, middle)
    return replace(one, crowd=(1.0, low))
