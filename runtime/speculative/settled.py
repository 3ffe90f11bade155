"""A γ that was chosen for several rounds: none of them is asked for, and what they were is taken in together.

Choosing takes as long as a quarter of a small model's forward, and learning from a round a tenth of it. So a choice
holds for a while, and its rounds are kept until there are some. If their drafts then gained much more or much less than
was expected, γ is chosen anew at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from runtime.speculative.measured import Round

# So many rounds are taken in together. What drafts gained in them is a surprise so many standard deviations from what
# was expected: by chance alone in one such group of a thousand.
TOGETHER, _SURPRISE = 16, 3.3
# A choice whose time is over still holds for so many rounds of a text that ends.
_ENDING = 8


class DraftBudget(NamedTuple):
    """γ of a round, and for how many of its requests: a probe drafts for one, which tells as much and costs less."""

    budget: int
    requests: int


class Look(NamedTuple):
    """A round of what does not look best.

    rate  what it gives up, in tokens per second.
    near  whether its drafts are somewhat longer or shorter than those that look best.
    """

    rate: float
    near: bool


@dataclass(eq=False)
class Settled:
    """What was chosen last.

    batch   of how many requests; most: which γ there was room for; budget: γ; until: up to which round.
    rates   tokens per second for γ = 0, 1, … when it was chosen.
    left    rounds that need not be asked for.
    rested  seconds of those of them that drafted nothing and are not taken in yet; rounds: those that drafted.
    """

    batch: int = 0
    most: int = 0
    budget: int = 0
    until: int = 0
    rates: Sequence[float] = ()
    left: int = 0
    rested: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def holds(self, batch: int, most: int, round_: int) -> bool:
        """Whether it is still what `batch` requests do in this round, with room for so many drafted tokens."""
        # The last rounds of a text, which has no room for γ any more, are no time to choose for the next one. What such
        # a limit had forced is chosen anew when there is room again.
        until = self.until if self.budget <= most else self.until + _ENDING
        return batch == self.batch and round_ < until and (self.budget < self.most or most <= self.most)

    def goes_on(self, batch: int, most: int) -> bool:
        """Whether the next round drafts γ tokens again, and need not be asked for."""
        return (
            self.left > 0
            and batch == self.batch
            and 0 < self.budget <= most
            and (self.budget < self.most or most <= self.most)
        )

    def ends(self, batch: int, most: int) -> bool:
        """Whether a text is about to end, with room for fewer than γ tokens, where rounds are not asked for."""
        return self.left > 0 and batch == self.batch and most < self.budget

    def within(self, most: int) -> int:
        """The γ that looked best of those of at most `most` tokens: near their ends texts have less room."""
        if self.budget <= most:
            return self.budget
        return max(range(most + 1), key=self.rates.__getitem__)

    def look(self) -> tuple[DraftBudget, Look] | None:
        """The best round that drafts, beside one that does not; None where there was no room for any."""
        if len(self.rates) < 2:
            return None
        budget = max(range(1, len(self.rates)), key=self.rates.__getitem__)
        return DraftBudget(budget, self.batch), Look(self.rates[0], near=False)

    def keeps(self, found: Round, first: bool) -> bool:
        """Whether a round is one that was not asked for, and like those before it; it is then kept.

        first  so is a text's first round, in which its drafter reads what it has missed. A text's last rounds, with
               fewer tokens, say nothing of this γ, and are forgotten.
        """
        if self.left <= 0 or found.batch != self.batch or found.budget > self.budget or (found.unread and not first):
            return False
        if found.budget == self.budget:
            self.left -= 1
            self.rounds.append(found)
        return True


def longer_than(budget: int) -> int:
    """γ of drafts a third longer."""
    return budget + max(1, budget // 3) if budget else 0


def beside(budget: int, most: int, last: int) -> int:
    """γ of drafts a third longer, of at most `most` tokens, or, where what was looked at `last` was longer, of shorter
    ones, which times that are out of date may make look bad for good; γ itself where there are none."""
    longer, shorter = min(longer_than(budget), most), budget - max(1, budget // 3)
    return shorter if shorter > 0 and (last > budget or longer == budget) else longer


def surprising(rounds: Sequence[Round], tokens: Sequence[float]) -> bool:
    """Whether drafts had much more or fewer tokens accepted than was to be expected.

    tokens  accepted tokens that were expected of γ = 0, 1, … up to that of the rounds.
    """
    drafts = [draft for one in rounds for draft in one.drafts]
    # Of a draft that is accepted to depth k with probability S(k) the square is Σ (2k − 1) S(k) on average.
    square = sum((2 * k + 1) * (more - less) for k, (less, more) in enumerate(pairwise(tokens)))
    mean, found = tokens[-1], sum([draft.accepted for draft in drafts])
    spread = max(square - mean**2, 0.1) * len(drafts)
    return (found - mean * len(drafts)) ** 2 > _SURPRISE**2 * spread
