"""What replicas on one machine cost each other, and how fast the machine is now: by texts at once, one a replica."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from runtime.bench.fleet import Fleet, gap
from runtime.bench.fleet_ask import after_a_pause, last_gap, random_prompts
from runtime.bench.fleet_figures import Figures, wavering

_PROMPT = 16  # tokens
_MOST, _NEAR = 8.0, 0.01  # what is believed of replicas that crowd each other, and how exactly it is found


def gaps_together(address: str, replicas: int, new_tokens: int, passes: int = 15) -> list[list[float]]:
    """Of 1, 2, … texts at once, one for each of an idle cluster's replicas: seconds between two tokens, of each pass.

    Raises UserError where nothing answers there, or a request is refused.
    """
    generator = np.random.default_rng()
    gaps: list[list[float]] = [[] for _ in range(replicas)]
    for _ in range(passes):
        for count in range(1, replicas + 1):  # the router gives each text to a replica of its own
            texts = after_a_pause(address, random_prompts(generator, count, _PROMPT, new_tokens))
            gaps[count - 1].append(last_gap(texts))
    return gaps


def together(one: Figures, cores: float, gaps: Sequence[Sequence[float]], new_tokens: int) -> Figures:
    """The figures of one replica as they are beside others, at the pace that the machine had when the gaps were seen.

    one   what ingress, client and Ray take of the cores while texts are written is no crowding.
    gaps  as `gaps_together` finds them, of texts of `new_tokens` tokens.
    """
    fleet, middle = Fleet(len(gaps), cores=cores), [median(seen) for seen in gaps]
    pace = middle[0] / gap(replace(one, crowd=(1.0,)), fleet, 1, _PROMPT, new_tokens)
    now = one.at_pace(pace)
    crowd = crowd_behind(now, fleet, middle, new_tokens)
    return replace(now, crowd=crowd, waver=tuple(map(wavering, gaps)), steady=new_tokens * middle[0])


def crowd_behind(one: Figures, fleet: Fleet, gaps: Sequence[float], new_tokens: int) -> tuple[float, ...]:
    """Figures.crowd with which texts of 1, 2, … replicas at once take so many times longer than one, as in `gaps`:
    seconds between two of their tokens, simulated by bisection."""

    def longer(crowd: tuple[float, ...]) -> float:
        told = replace(one, crowd=crowd)
        return gap(told, fleet, len(crowd), _PROMPT, new_tokens) / gap(told, fleet, 1, _PROMPT, new_tokens)

    crowd: tuple[float, ...] = (1.0,)
    for found in gaps[1:]:
        low, high = 1.0, _MOST
        while high - low > _NEAR:
            middle = (low + high) / 2
            low, high = (middle, high) if longer((*crowd, middle)) < found / gaps[0] else (low, middle)
        crowd = (*crowd, low)
    return crowd
