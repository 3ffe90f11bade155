"""What drafting costs and brings, as it was seen: time by the amount of work, accepted tokens by a draft's length.

All fade: what was seen lately counts more.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

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

    def add(self, at: int, *seconds: float) -> None:
        """Takes in measurements."""
        self._values = []
        self._means.pop(at, None)
        self.counts[at] = self.counts.get(at, 0) + len(seconds)
        if at not in self.times:
            self.times[at] = deque(maxlen=WINDOW)
            insort(self.known, at)
        self.times[at] += seconds

    def scale(self, factor: float) -> None:
        """What took so long takes so many times as long."""
        self.times = {at: deque((factor * one for one in times), WINDOW) for at, times in self.times.items()}
        self._values = []
        self._means.clear()

    def at(self, x: float) -> float:
        """The time at x; 0 where nothing was measured."""
        known = self.known
        if known and known[0] < x <= known[-1]:
            values, place = self._values or self._find(), bisect_left(known, x)
            low, high, begin = values[place - 1], values[place], known[place - 1]
            return low + (high - low) * (x - begin) / (known[place] - begin)
        return self.along((x,))[0]

    def along(self, xs: Sequence[float]) -> list[float]:
        """The times at some x that rise."""
        known = self.known
        if not known:
            return [0.0] * len(xs)
        values = self._values or self._find()
        first, last, place, found = known[0], known[-1], 1, []
        # The slope over all that is known, which wavers least. Of one time alone: more work is not more than
        # proportional.
        slope = (values[-1] - values[0]) / (last - first) if last > first else values[-1] / last if last > 0 else 0.0
        for x in xs:
            if x <= first:
                found.append(values[0])
            elif x > last:
                found.append(values[-1] + slope * (x - last))
            else:
                while known[place] < x:
                    place += 1
                low, high = values[place - 1], values[place]
                found.append(low + (high - low) * (x - known[place - 1]) / (known[place] - known[place - 1]))
        return found

    def middle(self, at: int) -> float:
        """The middle one of what was measured there lately; 0 where nothing was."""
        times = self.times.get(at)
        return sorted(times)[len(times) // 2] if times else 0.0

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
class Counts:
    """How often a first, a second, … place was hit, of the times that it might have been.

    Later times weigh more, which is the same as fading the earlier ones, and touches fewer numbers.
    """

    hits: list[float] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)
    weight: float = 1.0

    def fade(self, rounds: int = 1) -> None:
        """So many rounds have passed in which something was drafted."""
        self.weight /= _FADE**rounds
        if self.weight > _HEAVY:
            self.hits, self.tries = ([count / self.weight for count in counts] for counts in (self.hits, self.tries))
            self.weight = 1.0

    def count(self, hits: Sequence[int], tries: Sequence[int]) -> None:
        """Takes in how often each of the first places was hit, and how often it might have been."""
        if (lacking := len(tries) - len(self.tries)) > 0:
            self.hits += [0.0] * lacking
            self.tries += [0.0] * lacking
        for place, (hit, tried) in enumerate(zip(hits, tries, strict=True)):
            self.hits[place] += self.weight * hit
            self.tries[place] += self.weight * tried

    def upto(self, most: int, first: float) -> list[float]:
        """Of the first `most` places the share of hits. What is one place before counts for a few tries; `first`: what
        is hoped for at the first place."""
        prior, share, found = _PRIOR * self.weight, first, []
        for hits, tries in zip(self.hits[:most], self.tries, strict=False):
            share = (hits + prior * share) / (tries + prior)
            found.append(share)
        return found + [share] * (most - len(found))


class Lengths(Counts):
    """How many tokens drafts have, by how many they may have: some find fewer, or say that more are not worth it."""

    def begin(self, length: int) -> None:
        """Counts drafts that were seen elsewhere, and had so many tokens."""
        self.hits, self.tries = [_KNOWN] * length, [_KNOWN] * length

    def add(self, budget: int, *drafted: int) -> None:
        """Takes in drafts of at most `budget` tokens."""
        self.count(_beyond(drafted, budget), [len(drafted)] * budget)

    def shares(self, most: int) -> list[float]:
        """Of drafts of at most `most` tokens, those that have a first, a second, …"""
        return self.upto(most, 1.0)


class Chain(Counts):
    """Chains by depth: how many of those that had all tokens before one accepted had that one accepted, too."""

    def begin(self, accepted: Sequence[float]) -> None:
        """Counts drafts that were seen elsewhere: the share of them that was accepted to each depth, or further."""
        self.hits = [_KNOWN * share for share in accepted]
        self.tries = [_KNOWN * share for share in (1.0, *accepted[:-1])]

    def add(self, budget: int, *accepted: int) -> None:
        """Takes in drafts of at most `budget` tokens. One that found fewer counts as refused from there on."""
        hits = _beyond(accepted, budget)
        self.count(hits, [len(accepted), *hits][:budget])

    def tokens(self, most: int) -> list[float]:
        """Tokens that a draft of at most 0, 1, … `most` can be expected to have accepted."""
        return [*accumulate(accumulate(self.upto(most, _HOPED), mul), initial=0.0)]


class Tree(Counts):
    """Trees by their nodes in draft order: how often a first, a second, … was accepted of those that might have had it.

    Trees grow where they are most probable, so that one of fewer nodes is how one of more begins, and each tells of all
    smaller ones. Of nodes that were never there each doubling adds as many tokens.
    """

    def begin(self, nodes: int, accepted: float) -> None:
        """Counts trees that were seen elsewhere: how many of their tokens were accepted on average."""
        each = _KNOWN * accepted / math.log2(1 + nodes)
        self.hits, self.tries = [each * _adds(node) for node in range(nodes)], [_KNOWN] * nodes

    def add(self, budget: int, *paths: Sequence[int]) -> None:
        """Takes in trees of at most `budget` nodes, of each of which these were accepted."""
        hits = [0] * budget
        for path in paths:
            for node in path:
                hits[node] += 1
        self.count(hits, [len(paths)] * budget)

    def tokens(self, most: int) -> list[float]:
        """Tokens that trees of at most 0, 1, … `most` nodes can be expected to have accepted."""
        prior, share, found = _PRIOR * self.weight, _HOPED, [0.0]
        for node in range(most):
            share *= _adds(node) / _adds(node - 1) if node else 1.0
            if node < len(self.tries):
                share = (self.hits[node] + prior * share) / (self.tries[node] + prior)
            found.append(found[-1] + share)
        return found


def _beyond(counts: Sequence[int], most: int) -> list[int]:
    """How many of these, which are 0 to `most`, are above 0, 1, … `most` − 1."""
    found = [0] * (most + 1)
    for count in counts:
        found[count] += 1
    return [*accumulate(reversed(found[1:]))][::-1]


def _adds(node: int) -> float:
    """What a node adds to the logarithm of how many there are, to base 2."""
    return math.log2((node + 2) / (node + 1))


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
