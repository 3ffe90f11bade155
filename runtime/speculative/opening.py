"""The first rounds of all, which show what not drafting and drafting cost and bring, at little cost.

First some rounds without a draft, then drafts until a few have had tokens: of prompt lookup many find nothing, which
says little. Until one is accepted, drafts are as long as what trying out may cost affords if they are all wrong, where
four rows of a mixture of experts may cost twice as much as one, and those of a dense model next to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.speculative.measured import Drafted, Times
from runtime.speculative.spending import Spending

# Rounds without a draft, and of those where it is known what widths cost: any round then shows the machine's speed.
_PLAIN, _PLAIN_KNOWN = 2, 0
# Drafts that had tokens, and rounds in which they may come.
_DRAFTS, _ROUNDS = 3, 26
# The share of what trying out may still cost that one draft may take. The first has at most so many tokens, and each
# at most twice as many and one as the longest before it.
_SHARE, _FIRST = 0.6, 2


@dataclass
class Opening:
    """What first rounds have shown.

    going     whether they go on.
    plain     rounds without a draft that they begin with.
    accepted  whether any drafted token ever was; right: whether that was here, not elsewhere.
    drafts    rounds in which tokens were drafted; rounds: all.
    longest   γ of the longest draft.
    """

    going: bool
    plain: int
    accepted: bool
    drafts: int = 0
    rounds: int = 0
    longest: int = 0
    right: bool = False

    @staticmethod
    def of(known: bool, widths: bool) -> "Opening":
        """known: whether a prior tells of the drafter, so that nothing is tried; widths: whether their times do."""
        return Opening(not known, _PLAIN_KNOWN if widths else _PLAIN, known)

    def observe(self, budget: int, drafts: Sequence[Drafted], rounds: int = 1) -> None:
        """Takes in any rounds, these and later ones."""
        self.rounds += rounds
        self.longest = max(self.longest, budget)
        self.drafts += min(rounds, sum([draft.drafted > 0 for draft in drafts]))
        self.right = self.right or any(draft.accepted for draft in drafts)
        self.accepted = self.accepted or self.right

    @property
    def longer(self) -> int:
        """γ of a draft that is as much longer than the longest as may be."""
        return 2 * self.longest + 1 if self.longest else _FIRST

    def goes_on(self, times: Times, spent: Spending, batch: int) -> bool:
        """Whether a draft is still to be tried out, whatever those before have brought."""
        few = self.drafts < _DRAFTS and self.rounds < _ROUNDS
        self.going = few and self.affords(times, spent, batch, 1)
        return self.going

    def length(self, times: Times, spent: Spending, batch: int) -> int:
        """γ of the next one of the first drafts, before any token was accepted."""
        length = self.longer
        while length > 1 and not self.affords(times, spent, batch, length, share=_SHARE):
            length -= 1
        return length

    def affords(
        self, times: Times, spent: Spending, batch: int, budget: int, requests: int = 1, share: float = 1.0
    ) -> bool:
        """Whether a round of drafts may be made: until one was accepted they are as dear as if none will be."""
        if self.accepted:
            return True
        plain = times.target(batch)
        lost = times.target(batch + requests * budget) + times.drafting(requests, budget) - plain
        # The first draft of all is always made: without it nothing is ever known.
        return lost <= share * spent.left_for_drafts(plain) or (not self.drafts and budget == 1)
