"""What one replica does, in seconds: what a simulated fleet is made of."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Cost:
    """Seconds of a core that a process beside the engines spends on a request, a message of news, and a token."""

    request: float = 0.0
    message: float = 0.0
    token: float = 0.0

    def news(self, tokens: int) -> float:
        """On one message that tells of so many tokens."""
        return self.message + self.token * tokens


@dataclass(frozen=True)
class Figures:
    """What one replica does, in seconds.

    overhead  of a request beside all work: wakes, and the way to and fro.
    prompt    of a row of a prompt.
    rounds    (texts that decode, seconds of a round), rising; between them it is a line, beyond them the last slope.
    ingress   of the process that speaks HTTP; others: of the client, a replica's own server and Ray, which count where
              all share a machine.
    early     share of a request's cost that is spent before its first token; the rest, when its text has ended.
    held      that a request keeps its replica's other texts waiting, beyond what its rows take.
    background  of a core, in each second, what runs on the machine while nothing is asked for, where all share it.
    waver     how much what rounds take changes: the standard deviation of its logarithm, where 1, 2, … replicas run on
              one machine; steady: seconds after which it has changed.
    crowd     how many times longer all work takes while 1, 2, … replicas on one machine run rounds, beyond what sharing
              its cores costs: they share its memory and caches, too. The last is that of more, too.
    """

    overhead: float
    prompt: float
    rounds: tuple[tuple[int, float], ...]
    ingress: Cost = Cost()
    others: Cost = Cost()
    early: float = 1.0
    held: float = 0.0
    background: float = 0.0
    crowd: tuple[float, ...] = (1.0,)
    waver: tuple[float, ...] = (0.0,)
    steady: float = 0.0

    def round(self, decoding: int, rows: int) -> float:
        """Seconds of a round of so many texts that decode, and so many rows of prompts."""
        spent = self.prompt * rows
        if not decoding:
            return spent
        if len(self.rounds) == 1:
            return spent + self.rounds[0][1]
        pair = next((pair for pair in pairwise(self.rounds) if decoding <= pair[1][0]), tuple(self.rounds[-2:]))
        (low, first), (high, second) = pair
        return spent + first + (second - first) * (decoding - low) / (high - low)

    def at_pace(self, times: float) -> "Figures":
        """Those of a machine that takes so many times as long for everything."""
        ingress, others = (Cost(*(times * one for one in astuple(cost))) for cost in (self.ingress, self.others))
        return replace(
            self, overhead=times * self.overhead, prompt=times * self.prompt, held=times * self.held,
            background=times * self.background,
            rounds=tuple((texts, times * seconds) for texts, seconds in self.rounds), ingress=ingress, others=others,
        )  # fmt: skip


def wavering(seconds: Sequence[float]) -> float:
    """Figures.waver of times for the same: a standard deviation by percentiles, which single strays do not change."""
    low, high = np.percentile(np.log(seconds), [16, 84])
    return float(high - low) / 2
