"""What drafting costs and brings, as it was seen: time by the amount of work, accepted tokens by a draft's length.

All fade: what was seen lately counts more.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median

# Of so many last times of each amount of work the mean of the faster half counts. On a machine that others use, too,
# every third round may take three times as long: that hits long rounds as often as they are long, and so changes
# nothing of which one is best, but a few times of each show nothing else.
WINDOW = 16
_FEW = 4
# What a round leaves of the counts before it: some hundred rounds decide.
_FADE = 0.99
# How many drafts counts for what was known of a drafter before its first one.
_KNOWN = 6.0
# How many tries the acceptance one depth above counts for. A first token that nothing is known of is hoped for.
_PRIOR = 2.0
_HOPED = 0.5
# Trees that were seen so seldom lately say nothing.
_FORGOTTEN = 0.1
# Weights are brought back to 1 above this.
_HEAVY = 1e9


@dataclass
class Curve:
    """A time by an amount of work: what was measured lately, straight lines between and beyond.

    More work does not take less time: neighbours that fall are both taken for their mean. Nor does it take more than as
    many times as long, which bounds what was measured only a few times.
    """

    times: dict[int, deque[float]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    known: list[int] = field(default_factory=list, init=False)  # where, in order
    # What each of them takes by itself, once it was asked for, and all of them beside each other.
    _means: dict[int, float] = field(default_factory=dict, init=False)
    _values: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.known = sorted(self.times)

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "Curve":
        """One that knows these times from elsewhere: each counts as one measurement."""
        return cls({at: deque((seconds,), WINDOW) for at, seconds in values.items()})

    def add(self, at: int, seconds: float) -> None:
        """Takes in one measurement."""
        self._values = []
        self._means.pop(at, None)
        self.counts[at] = self.counts.get(at, 0) + 1
        if at not in self.times:
            self.times[at] = deque(maxlen=WINDOW)
            insort(self.known, at)
        self.times[at].append(seconds)

    def scale(self, factor: float) -> None:
        """What took so long takes so many times as long."""
        self.times = {at: deque((factor * one for one in times), WINDOW) for at, times in self.times.items()}
        self._values = []
        self._means.clear()

    def at(self, x: float) -> float:
        """The time at x; 0 where nothing was measured."""
        known = self.known
        if not known:
            return 0.0
        values = self._values or self._find()
        first, last = known[0], known[-1]
        if x <= first:
            return values[0]
        if x <= last:
            place = bisect_left(known, x)
            low, high = known[place - 1], known[place]
            share = (x - low) / (high - low)
            return values[place - 1] * (1 - share) + values[place] * share
        if first == last:
            # All that is known of the cost of more work: it is not more than proportional.
            return values[-1] * x / last if last > 0 else values[-1]
        # The slope over all that is known, which wavers least.
        return values[-1] + (values[-1] - values[0]) / (last - first) * (x - last)

    def middle(self, at: int) -> float:
        """The median of what was measured there lately; 0 where nothing was."""
        times = self.times.get(at)
        return median(times) if times else 0.0

    def _find(self) -> list[float]:
        """The values of `known`; those measured more often count more."""
        for at in self.known:
            if at not in self._means:
                self._means[at] = _faster_half(self.times[at])
        found, bound = [self._means[at] for at in self.known], math.inf
        for place, at in enumerate(self.known):
            if at > 0 and found[place] > 0:
                if len(self.times[at]) < _FEW:
                    found[place] = min(found[place], bound * at)
                bound = min(bound, found[place] / at)
        self._values = rising(found, [len(self.times[at]) for at in self.known])
        return self._values


def _faster_half(times: Collection[float]) -> float:
    """The mean of the faster half; of three the fastest: what looks slow for once would not be tried again."""
    half = max(1, len(times) // 2)
    return sum(sorted(times)[:half]) / half


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

    def begin(self, accepted: Sequence[float]) -> None:
        """Counts drafts that were seen elsewhere: the share of them that was accepted to each depth, or further."""
        self.reached = [_KNOWN * share for share in (1.0, *accepted[:-1])]
        self.accepted = [_KNOWN * share for share in accepted]
        self.allowed, self.drafted = ([_KNOWN] * len(accepted) for _ in range(2))

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
    """Trees by the most nodes that they may have: how many they had, and how many tokens of them were accepted.

    Between what was seen tokens grow with the logarithm of the nodes: each doubling adds as much. More nodes never gain
    less.
    """

    seen: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # accepted, nodes, count; all fading

    def begin(self, nodes: int, accepted: float) -> None:
        """Counts trees that were seen elsewhere: how many of their tokens were accepted on average."""
        self.seen[nodes] = _KNOWN * accepted, _KNOWN * nodes, _KNOWN

    def fade(self) -> None:
        """A round has passed in which something was drafted."""
        self.seen = {budget: (a * _FADE, n * _FADE, c * _FADE) for budget, (a, n, c) in self.seen.items()}

    def add(self, budget: int, nodes: int, accepted: int) -> None:
        """Takes in one tree."""
        before = self.seen.get(budget, (0.0, 0.0, 0.0))
        self.seen[budget] = before[0] + accepted, before[1] + nodes, before[2] + 1

    def tokens(self, most: int) -> list[float]:
        """Tokens that trees of at most 0, 1, … `most` nodes can be expected to have accepted."""
        known = sorted((budget, a / c, c) for budget, (a, _, c) in self.seen.items() if c > _FORGOTTEN)
        if not known:
            return [_HOPED * math.log2(1 + nodes) for nodes in range(most + 1)]
        means = rising([mean for _, mean, _ in known], [count for _, _, count in known])
        places = [math.log2(1 + budget) for budget, _, _ in known]
        # Nothing gains nothing; beyond the largest all doublings have added as much as those up to it.
        points = [(0.0, 0.0), *zip(places, means, strict=True), (2 * places[-1] + 9, means[-1] * (2 + 9 / places[-1]))]
        return [_between(points, math.log2(1 + nodes)) for nodes in range(most + 1)]

    def lengths(self, most: int) -> list[float]:
        """Nodes that trees of at most 0, 1, … `most` can be expected to have."""
        known = [(budget, n / c) for budget, (_, n, c) in self.seen.items() if c > _FORGOTTEN]
        if not known:
            return [float(nodes) for nodes in range(most + 1)]
        found = []
        for nodes in range(most + 1):
            budget, mean = min(known, key=lambda one: abs(one[0] - nodes))
            found.append(nodes * mean / budget)
        return found


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest numbers that nowhere fall, by the sum of weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            other, heavy, more = pools.pop()
            value = (value * weight + other * heavy) / (weight + heavy)
            weight, size = weight + heavy, size + more
        pools.append((value, weight, size))
    return [value for value, _, size in pools for _ in range(size)]


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The height at x of the lines through points, in order."""
    place = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (x - left) / (right - left)
