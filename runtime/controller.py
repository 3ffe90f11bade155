"""How many tokens to draft: the γ of each round that gains the most tokens per millisecond, by what was measured.

Tokens come from how often drafts were accepted to each depth, time from what drafting and forwards of each width took.
Both fade, so that a text which changes its nature, or a machine its speed, changes γ. Nothing is assumed of a drafter:
prompt lookup, which often finds nothing, and a model, which always drafts, are told apart by what they did.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 16
# What trying a length that does not look best may cost, as a share of all time.
PROBING = 0.005
# How much a new time counts against all earlier ones, and how many times the usual a slow one counts at most: a round
# in which the machine was elsewhere says little.
_RATE = 0.1
_OUTLIER = 1.5
# The least of so many first times counts: memory is new to them and threads asleep, and a width that looked slow once
# would not be tried again.
_FIRST = 3
# What drafting must promise over not drafting where requests share forwards. A round's rate does not show that texts of
# a batch which gain unevenly end unevenly, so that later forwards are shared by fewer.
MARGIN = 1.1
# What a round leaves of the counts before it: some hundred rounds decide.
_FADE = 0.99
# How many tries the acceptance one depth above counts for. A first token that nothing is known of is hoped for.
_PRIOR = 2.0
_HOPED = 0.7
# The first rounds of all, which show what not drafting and drafting cost.
_OPENING = (0, 0, 4, 4, 4)
# A choice holds for so many rounds at first, and twice as long each time that it is made again: choosing takes as long
# as a quarter of a small model's forward.
_HOLD, _LONGEST_HOLD = 4, 256


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

    def add(self, at: int, seconds: float) -> None:
        """Takes in one measurement."""
        old, count = self.values.get(at), self.counts.get(at, 0)
        self.counts[at] = count + 1
        if old is None:
            self.values[at] = seconds
            insort(self.known, at)
        elif count < _FIRST:
            self.values[at] = min(old, seconds)
        else:
            self.values[at] = old + _RATE * (min(seconds, _OUTLIER * old) - old)

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
        prior, above, alive = _PRIOR * self.weight, _HOPED, 1.0
        sums = [0.0]
        for depth in range(most):
            if depth < len(self.reached):
                above = (self.accepted[depth] + prior * above) / (self.reached[depth] + prior)
            alive *= above
            sums.append(sums[-1] + alive)
        return sums

    def lengths(self, most: int) -> list[float]:
        """Tokens that drafts of at most 0, 1, … `most` can be expected to have."""
        prior, above = _PRIOR * self.weight, 1.0
        sums = [0.0]
        for depth in range(most):
            if depth < len(self.allowed):
                above = (self.drafted[depth] + prior * above) / (self.allowed[depth] + prior)
            sums.append(sums[-1] + above)
        return sums


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


@dataclass(frozen=True)
class Drafted:
    """One request's draft in a round: its tokens, those accepted, and whether it was a chain or a tree."""

    drafted: int
    accepted: int
    chain: bool = True


class Choice(NamedTuple):
    """γ of a round, and for how many of its requests: a probe drafts for one, which tells as much and costs less."""

    budget: int
    requests: int


class Round(NamedTuple):
    """What one round was and took: `batch` requests, a draft of at most `budget` tokens for some of them.

    drafts  one for each request that was drafted for.
    width   rows of the target's forward.
    behind  one of these did not draft in the round before: its drafter had more to read than a round brings.
    """

    batch: int
    budget: int
    drafts: tuple[Drafted, ...]
    width: int
    draft_seconds: float
    target_seconds: float
    behind: bool = False


class Controller:
    """Chooses γ for all requests of a round. What it learns stays when requests come and go.

    limit  the largest γ that it may choose.
    """

    def __init__(self, limit: int = LONGEST) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.probing_seconds = 0.0
        self._chain, self._tree = Chain(), Tree()
        self._target = Curve()  # by width
        self._draft: dict[int, Curve] = {}  # by requests drafted for: by budget
        self._trees = False
        self._rounds = 0
        self._probing: float | None = None  # tokens per second that the round chosen last gave up
        self._again: Choice | None = None  # a probe that told nothing of its cost is repeated
        self._last: dict[bool, int] = {}  # when drafting, and not drafting, was last done
        self._catch_up = 0.0  # what a drafter took to read what one request gained without it, at most lately
        self._held: tuple[int, int, int, int] = (0, 0, 0, 0)  # batch, most, γ, and until which round
        self._hold = _HOLD

    def choose(self, batch: int, missing: int, alone: bool = True) -> Choice:
        """For a round of `batch` requests, of which the longest has room for `missing` drafted tokens.

        alone  no prompt shares the forward: the others are not observed, so nothing is tried in them.
        """
        most = min(self.limit, missing)
        probing, self._probing = self._probing, None
        again, self._again = self._again, None
        if most <= 0:
            return Choice(0, batch)
        if again is not None and alone:
            self._probing = probing
            return Choice(min(again.budget, most), min(again.requests, batch))
        if self._rounds < len(_OPENING):
            return Choice(min(_OPENING[self._rounds], most) if alone else 0, 1)
        held_batch, held_most, held, until = self._held
        # A text near its end allows less; a choice that such a limit had forced is made anew when there is room again.
        if batch == held_batch and held <= most and (held < held_most or most <= held_most) and self._rounds < until:
            return Choice(held, batch)
        rates = self.rates(batch, most)
        best = max(range(most + 1), key=rates.__getitem__)
        if best > 0 and not self._pays(batch, missing, rates[0], rates[best]):
            best = 0
        if not alone:
            return Choice(best, batch)
        other = self._other(batch, best, most)
        if other is None:
            self._hold = min(2 * self._hold, _LONGEST_HOLD) if (batch, best) == (held_batch, held) else _HOLD
            self._held = (batch, most, best, self._rounds + self._hold)
            return Choice(best, batch)
        self._probing = rates[best]
        return other

    def _pays(self, batch: int, missing: int, plain: float, drafting: float) -> bool:
        """Whether drafting at these tokens per second gains enough over not drafting to change to it, or to stay."""
        if batch > 1 and drafting < MARGIN * plain:
            return False
        if self._last.get(True, 0) == self._rounds:
            return True
        saved = batch * missing * (1 / max(plain, 1e-9) - 1 / drafting)
        return saved >= batch * self._catch_up

    def rates(self, batch: int, most: int) -> list[float]:
        """Tokens per second that a round of γ = 0, 1, … `most` for all requests can be expected to gain.

        0 for one whose forward is more than twice as wide as any before: what it takes is found out step by step.
        """
        tokens, lengths = self._expected(most)
        widest = 2 * max(self._target.values, default=batch)
        found = []
        for budget in range(most + 1):
            width = batch * (1 + lengths[budget])
            if budget > 0 and width > widest:
                found.append(0.0)
                continue
            seconds = self._target.at(width) + self._draft_time(batch, budget)
            found.append(batch * (1 + tokens[budget]) / max(seconds, 1e-9))
        return found

    def observe(self, found: Round) -> None:
        """Learns from a round."""
        taken = found.draft_seconds + found.target_seconds
        self.seconds += taken
        # Right after a draft the processor's caches hold the draft's weights: what not drafting takes, the next shows.
        changing = found.budget == 0 and self._rounds > 0 and self._last.get(True, -1) == self._rounds
        self._rounds += 1
        self._last[found.budget > 0] = self._rounds
        if found.budget > 0:
            self._chain.fade()
            self._tree.fade()
            self._trees = self._trees or not all(draft.chain for draft in found.drafts)
            for draft in found.drafts:
                if self._trees:
                    self._tree.add(found.budget, draft.accepted)
                else:
                    self._chain.add(found.budget, draft.drafted, draft.accepted)
            if found.behind and found.drafts:
                usual = self._draft_time(len(found.drafts), found.budget)
                extra = max(0.0, found.draft_seconds - usual) / len(found.drafts)
                self._catch_up = max(extra, (1 - _RATE) * self._catch_up)
            if not found.behind:
                curve = self._draft.setdefault(len(found.drafts), Curve({0: 0.0}))
                curve.add(found.budget, found.draft_seconds)
        if not changing:
            self._target.add(found.width, found.target_seconds)
        if self._probing is not None:
            if found.behind and found.budget > 0:
                self._again = Choice(found.budget, len(found.drafts))
            elif changing:
                self._again = Choice(0, found.batch)
            # Feeding a draft model what it has missed meanwhile is part of what a probe costs.
            gained = found.batch + sum(draft.accepted for draft in found.drafts)
            self.probing_seconds += max(0.0, taken - gained / self._probing)

    def _other(self, batch: int, best: int, most: int) -> Choice | None:
        """A round of what looked worse, if it is due and can be afforded: drafting where none is done, or none."""
        if self._last.get(best == 0, 0) == self._rounds or self.probing_seconds >= PROBING * self.seconds:
            return None
        tokens, lengths = self._expected(most)
        rate = self.rates(batch, best)[best]
        if best > 0:
            choice, gained, seconds = Choice(0, batch), float(batch), self._target.at(batch)
        else:
            alone = [
                (batch + tokens[n]) / (self._target.at(batch + lengths[n]) + self._draft_time(1, n))
                for n in range(most + 1)
            ]
            budget = max(range(1, most + 1), key=alone.__getitem__)
            choice, gained = Choice(budget, 1), batch + tokens[budget]
            seconds = gained / alone[budget] + self._catch_up
        lost = max(0.0, seconds - gained / rate)
        return choice if self.probing_seconds + lost <= PROBING * self.seconds else None

    def _expected(self, most: int) -> tuple[list[float], list[float]]:
        """Accepted tokens and drafted ones, for γ = 0, 1, … `most`."""
        if self._trees:
            return [self._tree.tokens(n) for n in range(most + 1)], [float(n) for n in range(most + 1)]
        return self._chain.tokens(most), self._chain.lengths(most)

    def _draft_time(self, requests: int, budget: int) -> float:
        if budget == 0 or not self._draft:
            return 0.0
        # Unknown numbers take what the nearest known one takes: a draft model reads its weights once for all.
        nearest = min(self._draft, key=lambda known: abs(known - requests))
        return self._draft[nearest].at(budget)
