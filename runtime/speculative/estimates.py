"""What drafting costs and brings, as it was seen: time by the amount of work, accepted tokens by a draft's length.

All fade: what was seen lately counts more.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

# How much a new time counts against all earlier ones, and how many times the usual a slow one counts at most: a round
# in which the machine was elsewhere says little.
RATE = 0.1
OUTLIER = 1.5
# The least of so many first times counts: memory is new to them and threads asleep, and a width that looked slow once
# would not be tried again.
_FIRST = 3
# What a round leaves of the counts before it: some hundred rounds decide.
_FADE = 0.99
# How many tries the acceptance one depth above counts for. A first token that nothing is known of is hoped for.
_PRIOR = 2.0
_HOPED = 0.5
# Weights are brought back to 1 above this.
_HEAVY = 1e9


@dataclass
class Curve:
    """A time by an amount of work: a fading mean where it was measured, straight lines between and beyond."""

    values: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    known: list[int] = field(default_factory=list, init=False)  # where, in order

    def __post_init__(self) -> None:
        self.known = sorted(self.values)

    def add(self, at: int, seconds: float, times: int = 1) -> None:
        """Takes in one measurement, or the mean of as many as `times`."""
        old, count = self.values.get(at), self.counts.get(at, 0)
        self.counts[at] = count + times
        if old is None:
            self.values[at] = seconds
            insort(self.known, at)
        elif count < _FIRST:
            self.values[at] = min(old, seconds)
        else:
            rate = 1 - (1 - RATE) ** times
            self.values[at] = old + rate * (min(seconds, OUTLIER * old) - old)

    def assume(self, at: int, seconds: float) -> None:
        """Takes a time for what `at` takes for as long as that was not measured."""
        if at not in self.counts:
            if at not in self.values:
                insort(self.known, at)
            self.values[at] = seconds

    def at(self, x: float) -> float:
        """The time at x; 0 where nothing was measured."""
        known = self.known
        if not known:
            return 0.0
        first, last = known[0], known[-1]
        if x <= first:
            return self.values[first]
        if x <= last:
            place = bisect_left(known, x)
            low, high = known[place - 1], known[place]
            share = (x - low) / (high - low)
            return self.values[low] * (1 - share) + self.values[high] * share
        if first == last:
            # All that is known of the cost of more work: it is not more than proportional.
            return self.values[last] * x / last if last > 0 else self.values[last]
        # The slope over all that is known, which wavers least; never downwards: more work does not take less time.
        slope = max(0.0, (self.values[last] - self.values[first]) / (last - first))
        return self.values[last] + slope * (x - last)


@dataclass
class Chain:
    """Chains by depth: how often one could have gone so far, had that many tokens, and had them accepted.

    Later drafts weigh more, which is the same as fading the earlier ones, and touches fewer numbers.
    """

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    weight: float = 1.0

    def fade(self) -> None:
        """A round has passed in which something was drafted."""
        self.weight /= _FADE
        if self.weight > _HEAVY:
            for counts in (self.reached, self.accepted, self.allowed, self.drafted):
                counts[:] = [count / self.weight for count in counts]
            self.weight = 1.0

    def add(self, budget: int, drafted: int, accepted: int) -> None:
        """Takes in one draft of at most `budget` tokens. One that found fewer counts as refused from there on."""
        longest = len(self.reached)
        if budget > longest:
            for counts in (self.reached, self.accepted, self.allowed, self.drafted):
                counts += [0.0] * (budget - longest)
        for counts, upto in (
            (self.allowed, budget),
            (self.drafted, drafted),
            (self.reached, min(accepted + 1, budget)),
            (self.accepted, accepted),
        ):
            for depth in range(upto):
                counts[depth] += self.weight

    def tokens(self, most: int) -> list[float]:
        """Tokens that a draft of at most 0, 1, … `most` can be expected to have accepted."""
        alive = accumulate(self._rates(self.accepted, self.reached, most, _HOPED), mul)
        return [*accumulate(alive, initial=0.0)]

    def lengths(self, most: int) -> list[float]:
        """Tokens that drafts of at most 0, 1, … `most` can be expected to have."""
        return [*accumulate(self._rates(self.drafted, self.allowed, most, 1.0), initial=0.0)]

    def _rates(self, hits: Sequence[float], tries: Sequence[float], most: int, above: float) -> Iterator[float]:
        """Hits a try at each depth; the rate one depth above counts for a few tries, `above` for those of the first."""
        prior = _PRIOR * self.weight
        for depth in range(most):
            if depth < len(tries):
                above = (hits[depth] + prior * above) / (tries[depth] + prior)
            yield above


@dataclass
class Tree:
    """Trees by the number of their nodes: how many tokens were accepted. More nodes never gain less."""

    gained: dict[int, tuple[float, float]] = field(default_factory=dict)  # sum and count, both fading

    def fade(self) -> None:
        """A round has passed in which something was drafted."""
        self.gained = {nodes: (total * _FADE, count * _FADE) for nodes, (total, count) in self.gained.items()}

    def add(self, nodes: int, accepted: int) -> None:
        """Takes in one tree."""
        total, count = self.gained.get(nodes, (0.0, 0.0))
        self.gained[nodes] = (total + accepted, count + 1)

    def tokens(self, nodes: int) -> float:
        """Tokens that a tree of so many nodes can be expected to have accepted: each doubling adds as much."""
        known = [(size, total / count) for size, (total, count) in self.gained.items() if count > 0.1]
        if not known or nodes == 0:
            return 0.0 if nodes == 0 else _HOPED * nodes.bit_length()
        size, mean = min(known, key=lambda one: abs(one[0].bit_length() - nodes.bit_length()))
        return mean * nodes.bit_length() / size.bit_length()
