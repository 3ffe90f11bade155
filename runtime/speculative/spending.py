"""What finding out may cost: trying a drafter out, and rounds of what does not look best."""

import math
from dataclasses import dataclass

from runtime.speculative.measured import Round

# What drafting where it does not look best may cost, as a share of all time, and not drafting where drafting does: a
# machine that was slow while nothing was drafted makes drafting look good for as long as nobody looks again.
PROBING = 0.005
CHECKING = 0.01  # times the square of what not drafting gains over what drafting does: the further, the less in doubt
# What drafts somewhat longer or shorter than those that look best may cost, as a share of all time: that a second token
# costs less than the first one did is only seen by drafting it; and before there is much time to take a share of, in
# rounds without drafts.
_NEAR, _NEAR_CREDIT = 0.0025, 2.0
# What trying a drafter out may cost beside that: a share of the time of the first rounds, of the first text's in
# advance, but then neither less nor more than so many rounds without drafts. A drafter whose first drafts were wrong by
# chance would otherwise rest for hundreds of rounds between two more.
TRYING, LEAST_CREDIT, CREDIT = 0.0125, 0.75, 4.0
TRIED = 800
# How much a round counts in what choosing γ takes.
_ASKING = 0.1
# A round that takes more than so many times as long as it should was one in which the machine was elsewhere.
SLOW = 2.0


@dataclass
class Spending:
    """Seconds that finding out has cost, and how many more it may; `plain` is what a round without drafts takes.

    seconds   of all rounds; asking: of choosing γ in a round in which that was done, a fading mean.
    probing   of drafts until one was accepted, and later of those that were looked at where none are made.
    checking  of rounds without drafts where drafts are made.
    near      of drafts somewhat longer or shorter than those that look best.
    credit    rounds without drafts that trying out may cost; 0: no text has begun.
    """

    seconds: float = 0.0
    probing: float = 0.0
    checking: float = 0.0
    near: float = 0.0
    credit: float = 0.0
    asking: float = 0.0

    def took(self, seconds: float, asking: float) -> None:
        """Takes in a round of so many seconds, of which choosing γ took `asking`; 0: it was not done, or not timed."""
        self.seconds += seconds
        if asking > 0:
            self.asking += (_ASKING if self.asking else 1.0) * (asking - self.asking)

    def begin(self, missing: int) -> None:
        """The first text begins, which may become `missing` tokens longer."""
        self.credit = min(CREDIT, max(LEAST_CREDIT, TRYING * missing))

    def left_for_drafts(self, plain: float) -> float:
        """What trying out, and drafts where none are made, may still cost."""
        return PROBING * self.seconds + max(self.credit * plain, self._first(plain)) - self.probing

    def _first(self, plain: float) -> float:
        """The share of the first rounds' time, as far as it has passed."""
        return TRYING * min(self.seconds, TRIED * plain)

    def rounds_until(self, lost: float, plain: float) -> int:
        """Rounds without drafts until drafts that lose so many seconds can be afforded."""
        if plain <= 0:
            return 0
        seconds = self.probing + lost
        # The credit and the share of the first rounds are not added: whichever is more counts.
        later = (seconds - max(self.credit, TRYING * TRIED) * plain) / PROBING - self.seconds
        if (ends := TRIED * plain - self.seconds) > 0:
            by_credit = (seconds - self.credit * plain) / PROBING - self.seconds
            by_share = seconds / (PROBING + TRYING) - self.seconds
            later = min(by_credit, by_share if by_share <= ends else later)
        return max(0, math.ceil(later / plain))

    def left_for_none(self, gain: float) -> float:
        """What not drafting may still cost, which gains so many times what drafting does."""
        return CHECKING * gain**2 * self.seconds - self.checking

    def left_for_near(self, plain: float) -> float:
        """What somewhat longer or shorter drafts may still cost."""
        return _NEAR * self.seconds + _NEAR_CREDIT * plain - self.near


def worth(seconds: float, rows: int, rate: float) -> float:
    """The probability of a token that gains what its row takes, where so many more rows take so many seconds and a
    round gains `rate` tokens a second."""
    return max(0.0, seconds) / rows * rate


def lost_in_trying(found: Round, plain: float, most: float, reads: bool) -> float:
    """Seconds that a round of first drafts lost to rounds without drafts of `plain` each, and asking for it.

    most   what its forward is taken for at most, by what is known of so many rows.
    reads  whether a drafter read what it had missed of the text: that is not of this draft.
    """
    # No more rows take more than as many times as long, nor much more than is known that they take.
    forward = min(found.target_seconds, plain * found.width / found.batch, most)
    drafting = 0.0 if reads else min(found.draft_seconds, SLOW * plain)
    gained = sum(draft.accepted for draft in found.drafts) / found.batch
    return max(0.0, forward + drafting + found.asking - (1 + gained) * plain)
