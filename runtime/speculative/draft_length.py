"""How many tokens to draft: the γ of each round that gains the most tokens per millisecond, by what was measured.

Tokens come from how often drafts were accepted to each depth, time from what drafting and forwards of each width took.
Both fade, so that a text which changes its nature, or a machine its speed, changes γ. Nothing is assumed of a drafter:
prompt lookup, which often finds nothing, and a model, which always drafts, are told apart by what they did.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from runtime.speculative.measured import NOTHING_KNOWN, Gains, Prior, Round, Times, rates_of_one, round_rates
from runtime.speculative.opening import Opening
from runtime.speculative.parts import Parts
from runtime.speculative.settled import TOGETHER, DraftBudget, Look, Settled, beside, longer_than, surprising
from runtime.speculative.spending import SLOW, Spending, lost_in_trying, worth

LONGEST = 16
# How often longer drafts are looked at before a choice holds for long. Shorter ones are, where it holds for so long.
_LOOKS, _SETTLED = 3, 64
# What reading is said to take is the least of so many last times: in one alone the machine may have been elsewhere.
# Each time that it is what keeps from drafting it counts so much less, or nobody would ever see what it really takes.
_READ, _UNREAD = 3, 0.9
# What drafting must promise over not drafting where requests share forwards. A round's rate does not show that texts of
# a batch which gain unevenly end unevenly, so that later forwards are shared by fewer.
MARGIN = 1.15
# Of a drafter of whose drafts few were seen, the longest are made that come so near to what looks best: they teach
# more, where a first estimate that is too low would correct itself late. After so many drafts the best are made.
_HOPE, _HOPEFUL = 0.04, 24
# Of a rest's rounds so many last ones tell what not drafting takes.
_RESTED = 9
# Where none are made, but would gain this share of what not drafting does, the longest drafts are looked at that gain
# this share of the best: only they show what a second token brings and costs, which may be little beside the first's.
_TELLING = 0.8
# A look that found nothing to draft is repeated so often: it has cost nothing, and told nothing of what drafts bring.
_REPEATS = 8
# A choice holds for so many rounds at first, and twice as long each time that it is made again: choosing takes as long
# as a quarter of a small model's forward. Not drafting is looked at again sooner, for few looks decide it; so are
# longer drafts until some were seen.
_HOLD, _LONGEST_HOLD, _LONGEST_REST, _LONGEST_UNSEEN, _LONGEST_WAIT = 4, 256, 64, 16, 512
# A choice stays where another one promises hardly more: around the best γ rates are flat, and its neighbours look best
# by turns.
_HARDLY = 0.01


class Controller:
    """Chooses γ for all requests of a round. What it learns stays when requests come and go.

    limit   the largest γ that it may choose.
    prior   what is known of the drafter: it then begins with the γ that this finds best, and tries nothing out before.
    widths  by rows, what a forward takes over one of one row, where it was measured.
    """

    def __init__(
        self, limit: int = LONGEST, prior: Prior | None = None, widths: Mapping[int, float] = NOTHING_KNOWN
    ) -> None:
        self.limit = limit
        self.widths = widths
        self.spent = Spending()
        self.worth: float | None = None  # the probability of a token that is just worth its row; None: not known yet
        self._times, self._gains = Times(prior, widths), Gains(prior)
        self._parts = Parts(self._times)
        self._opening = Opening.of(prior is not None, bool(widths))
        self._rounds = 0
        self._empty = self._paid = 0  # looks one after the other that found nothing to draft, and that paid
        self._look: Look | None = None  # what the round chosen last is, unless it looks best
        self._tried = False  # whether the last round was a draft that is charged to what trying out may cost
        self._beside = self._beside_at = 0  # γ of the last look at somewhat longer or shorter drafts; its round
        # What the next round does: a probe that told nothing of its cost is repeated, and after a rest drafts wait.
        self._next: tuple[DraftBudget, Look | None] | None = None
        self._last: dict[bool, int] = {}  # when drafting, and not drafting, was last done
        # What a drafter took to read a token that was written without it.
        self._reads: deque[float] = deque(maxlen=_READ)
        self._reading = 0.0
        self._missed = 0  # how many tokens it read so last
        self._held = Settled()
        self._hold = _HOLD
        self._unaffordable = 0  # rounds without drafts until a look at drafts can be afforded

    @property
    def limits(self) -> Mapping[int, int]:
        """By number the most tokens of a draft by a chain's later drafters (2, …); it changes as γ is chosen."""
        return self._times.limits

    def resting(self, batch: int) -> bool:
        """Whether it is settled that the next round of `batch` requests drafts nothing.

        Such a round need not be asked for: what it took is told to `rested`, which costs a tenth of asking and telling.
        """
        held = self._held
        return held.left > 0 and held.budget == 0 and batch == held.batch

    def rested(self, seconds: float) -> None:
        """Learns from a round that was not asked for, of no drafts and no prompts."""
        self._held.left -= 1
        self._held.rested.append(seconds)

    def look(self, batch: int) -> None:
        """Ends a rest of rounds of `batch` requests by one that drafts: a choice among drafters looks at this one."""
        if self.resting(batch) and self._next is None and (look := self._held.look()) is not None:
            self._next, self._held.left = look, 0

    def next_budget(self, batch: int, missing: int, alone: bool = True, unread: int = 1) -> DraftBudget:
        """For a round of `batch` requests, of which the longest has room for `missing` drafted tokens.

        alone   no prompt shares the forward: the others are not observed, so nothing is tried in them.
        unread  tokens that the drafter would have to read first of a request, of the one that it knows best.

        The first round after a rest never drafts: what drafters read of the target they do not read while it lasts.
        """
        held, most = self._held, min(self.limit, missing)
        if held.goes_on(batch, most) or held.ends(batch, most):
            return DraftBudget(held.within(most), batch)
        rested = self._take_in()
        held.left, self._look = 0, None
        if not self.spent.credit:
            self.spent.begin(missing)
        planned, self._next = self._next, None
        if most <= 0:
            return DraftBudget(0, batch)
        if planned is not None and alone:
            (budget, requests), self._look = planned
            return DraftBudget(min(budget, most), min(requests, batch))
        chosen = self._choose(batch, missing, most, alone, unread)
        if rested and chosen.budget > 0:
            self._next, self._look = (chosen, self._look), None
            return DraftBudget(0, batch)
        return chosen

    def _take_in(self) -> bool:
        """Learns from the rounds that were not asked for; whether the last of them rested."""
        held = self._held
        if rested := held.rested:
            held.rested = []
            self._rounds += len(rested)
            self._last[False] = self._rounds
            self.spent.seconds += sum(rested)
            self._times.add_target(held.batch, median(rested[-_RESTED:]), len(rested))
        if rounds := held.rounds:
            held.rounds = []
            self._rounds += len(rounds)
            self._last[True] = self._rounds
            self.spent.seconds += sum([one.draft_seconds + one.target_seconds for one in rounds])
            drafts = [draft for one in rounds for draft in one.drafts]
            self._opening.observe(held.budget, drafts, len(rounds))
            if surprising(rounds, self._gains.tokens(held.budget)):
                held.until = held.left = 0
                self._hold = _HOLD
            self._gains.add(held.budget, drafts, len(rounds))
            self._parts.add(rounds)
            self._times.add(rounds)
        return bool(rested)

    def _choose(self, batch: int, missing: int, most: int, alone: bool, unread: int) -> DraftBudget:
        """What looks best, or what is to be looked at; arguments as for `next_budget`, of at most `most` tokens."""
        if self._opening.going and self._rounds < self._opening.plain:
            return DraftBudget(0, 1)
        if self._opening.going and self._opening.goes_on(self._times, self.spent, batch):
            if not alone:
                return DraftBudget(0, 1)
            if not self._opening.accepted:
                return DraftBudget(min(self._opening.length(self._times, self.spent, batch), most), 1)
            # What drafts for all gain, those for one of a batch do not show by themselves: longer ones have to.
            longest = self._opening.longer if batch > 1 else self._hopeful(self.rates(batch, most), least=1)
            return DraftBudget(min(longest, most), 1)
        held = self._held
        if held.holds(batch, most, self._rounds):
            return DraftBudget(held.within(most), batch)
        rates = self.rates(batch, most)
        best = self._hopeful(rates)
        if batch == held.batch and 0 < held.budget < len(rates) and rates[held.budget] >= (1 - _HARDLY) * rates[best]:
            best = held.budget
        rows = batch * max(best, 1)
        self.worth = worth(self._times.target(batch + rows) - self._times.target(batch), rows, rates[best])
        if best > 0 and not (
            self._pays(batch, missing, rates[0], rates[best], unread)
            and self._opening.affords(self._times, self.spent, batch, best, batch)
        ):
            best = 0
        if best > 0:
            self._parts.choose(batch, best, rates[best], self.spent.seconds)
        if not alone:
            return DraftBudget(best, batch)
        other, near = self._other(batch, best, unread, rates), None
        if other is None:
            other = near = self._near(batch, best, rates)
        if other is None:
            longest = _LONGEST_REST if best == 0 else self._longest(best, most)
            settled = (batch, best) == (held.batch, held.budget)
            self._hold = hold = max(_HOLD, min(2 * self._hold if settled else _HOLD, longest))
            if best == 0:  # asking costs as well: not before the next look can be afforded
                hold = max(hold, min(self._unaffordable, _LONGEST_WAIT))
            elif self._parts.looking:
                hold = _HOLD
            self._held = Settled(batch, most, best, self._rounds + hold, rates)
            return DraftBudget(best, batch)
        self._look = Look(rates[best], near is not None)
        return other

    def _hopeful(self, rates: Sequence[float], least: int = 0) -> int:
        """γ of the highest rate; of a drafter of which little was seen the longest that comes near to it."""
        best = max(range(least, len(rates)), key=rates.__getitem__)
        if best == 0 or self._opening.drafts >= _HOPEFUL:
            return best
        near = (1 - _HOPE * (1 - self._opening.drafts / _HOPEFUL)) * rates[best]
        return max(budget for budget, rate in enumerate(rates) if rate >= near)

    def _pays(self, batch: int, missing: int, plain: float, drafting: float, unread: int) -> bool:
        """Whether drafting at these tokens per second gains enough over not drafting to change to it, or to stay."""
        if batch > 1 and drafting < MARGIN * plain:
            return False
        if self._last.get(True, 0) == self._rounds:
            return True
        saved = batch * missing * (1 / max(plain, 1e-9) - 1 / drafting)
        if saved >= batch * unread * self._reading:
            return True
        self._reading *= _UNREAD if saved > 0 else 1.0
        return False

    def rates(self, batch: int, most: int) -> list[float]:
        """See measured.round_rates."""
        return round_rates(self._times, self._gains, batch, most)

    def observe(self, found: Round) -> None:
        """Learns from a round."""
        held = self._held
        if held.keeps(found, first=len(self._reads) == _READ):
            if len(held.rounds) >= TOGETHER:
                self._take_in()
            return
        self._take_in()
        taken = found.draft_seconds + found.target_seconds + found.asking
        self.spent.took(taken, found.asking)
        # Right after a draft the processor's caches hold the draft's weights: what not drafting takes, the next shows.
        changing = found.budget == 0 and self._rounds > 0 and self._last.get(True, -1) == self._rounds
        self._rounds += 1
        self._last[found.budget > 0] = self._rounds
        if found.budget == held.budget and found.batch == held.batch and self._look is None:
            # A drafter of which nothing was right yet is watched round by round.
            held.left = held.until - self._rounds if found.budget == 0 or self._opening.accepted else 0
        expected = 0.0
        if self._look is not None:
            expected = self._times.target(found.width)
            expected += self._times.drafting(len(found.drafts), found.budget, found.asked)
        drafted = any(draft.drafted for draft in found.drafts)
        self._charge(found, changing)
        self._opening.observe(found.budget, found.drafts)
        if found.budget > 0:
            self._gains.add(found.budget, found.drafts)
            self._parts.add((found,))
            if found.unread and found.drafts:
                usual = self._times.drafting(len(found.drafts), found.budget, found.asked)
                self._reads.append(max(0.0, found.draft_seconds - usual) / found.unread)
                self._reading, self._missed = min(self._reads), found.unread
            if not found.unread:
                self._times.add_drafting(len(found.drafts), found.budget, found.draft_seconds, asked=found.asked)
        if not changing:
            self._times.add_target(found.width, found.target_seconds)
        if self._look is not None:
            self._empty = self._empty + 1 if found.budget > 0 and not drafted else 0
            if found.budget > 0 and (found.unread or 0 < self._empty <= _REPEATS):
                self._next = DraftBudget(found.budget, len(found.drafts)), self._look
            elif changing:
                self._next = DraftBudget(0, found.batch), self._look
            # Feeding a draft model what it has missed meanwhile is part of what a probe costs.
            gained = found.batch + sum(draft.accepted for draft in found.drafts)
            # Not if the machine was elsewhere.
            usual = min(taken, SLOW * expected) if expected > 0 and not found.unread else taken
            lost = max(0.0, usual - gained / self._look.rate)
            if self._look.near:
                self.spent.near += lost
            elif found.budget > 0:
                self.spent.probing += lost
                self._paid = self._paid + 1 if drafted and lost == 0 else 0
                if 0 < self._paid < _LOOKS:
                    # It paid, against what was thought of it: another one tells whether that was luck. Not for ever: it
                    # is held against what was thought before, when the machine may have been slower.
                    self._next = DraftBudget(found.budget, len(found.drafts)), self._look
            else:
                self.spent.checking += lost

    def _charge(self, found: Round, changing: bool) -> None:
        """Counts what drafts cost until one is accepted, and the round right after them, as trying out."""
        if found.budget == 0:
            if changing and self._tried:
                plain = self._times.target(found.batch)
                self.spent.probing += min(found.target_seconds, SLOW * plain) - plain
            self._tried = False
            return
        trying = self._look is None and not self._opening.accepted
        self._tried = trying or (self._look is not None and not self._look.near)
        if trying:
            most = SLOW * self._times.target(found.width) if self.widths else math.inf
            reads = found.unread > 0 or not self._times.begun(found.asked)
            self.spent.probing += lost_in_trying(found, self._times.target(found.batch), most, reads)

    def _other(self, batch: int, best: int, unread: int, rates: Sequence[float]) -> DraftBudget | None:
        """A round of what looked worse, if it is due and can be afforded: drafting where none is done, or none."""
        done = self._last.get(best == 0, 0) == self._rounds
        if done and best > 0:
            return None
        rate = rates[best]
        plain = self._times.target(batch)
        left = self.spent.left_for_none(rates[0] / rate) if best else self.spent.left_for_drafts(plain)
        if left <= 0 < best:
            return None
        if best > 0:
            choice, gained, seconds = DraftBudget(0, batch), float(batch), plain
        else:
            most = len(rates) - 1
            tokens, alone = self._gains.tokens(most), rates_of_one(self._times, self._gains, batch, most)
            budget = max(range(1, most + 1), key=alone.__getitem__)
            if self._opening.right and alone[budget] >= _TELLING * alone[0]:
                near = [n for n in range(budget, most + 1) if rates[n] > 0 and alone[n] >= _TELLING * alone[budget]]
                budget = max(near, default=budget)
            choice, gained = DraftBudget(budget, 1), batch + tokens[budget]
            unread = self._missed if done else unread  # after the rest it will have missed some again
            seconds = gained / alone[budget] + unread * self._reading + self.spent.asking
        lost = max(0.0, seconds - gained / rate)
        if best == 0:
            self._unaffordable = self.spent.rounds_until(lost, plain)
        return choice if lost <= left and not done else None

    def _near(self, batch: int, best: int, rates: Sequence[float]) -> DraftBudget | None:
        """A round of drafts somewhat longer or shorter than those that look best, if it is due and can be afforded."""
        if self._rounds - self._beside_at < _HOLD:
            return None
        near = self._beside = beside(best, len(rates) - 1, self._beside if self._hold >= _SETTLED else 0)
        lost = batch * (1 + self._gains.tokens(near)[near]) * (1 / max(rates[near], 1e-9) - 1 / rates[best])
        if near == best or lost > self.spent.left_for_near(self._times.target(batch)):
            return None
        self._beside_at = self._rounds
        return DraftBudget(near, batch)

    def _longest(self, best: int, most: int) -> int:
        """For how many rounds drafts may be chosen: until drafts a third longer were looked at often enough for few."""
        if (longer := min(longer_than(best), most)) == best or self._times.drafts(longer) >= _LOOKS:
            return _LONGEST_HOLD
        return _LONGEST_UNSEEN if self._opening.drafts >= _HOPEFUL else _HOLD
