"""How long the drafts are of a chain's later drafters: of one, say, that is asked where lookup finds nothing.

γ is chosen for the chain. What lookup copies costs nothing and may be long; whoever is asked behind it takes its own
time for each token, and may be right less often, so that the chain's γ is too long for it, or it is not worth asking.
A text gains so many tokens a second as it is: a draft pays that brings more than its time would bring otherwise.
"""

from collections.abc import Sequence
from itertools import accumulate

from runtime.speculative.measured import Gains, Round, Times

# A drafter is not limited before so many of its drafts were seen.
_SEEN = 8
# What looks at one that is not asked any more may cost, as a share of all time, and how long their drafts are: one of
# a single token would say little of what longer ones bring, and nothing of what they take.
_LOOKING, _LOOK = 0.005, 4


class Parts:
    """The later drafters of a chain, by their number (2, …); `times` is told the most tokens of a draft by each."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._gains: dict[int, Gains] = {}
        self._drafts: dict[int, int] = {}
        # Of one that is looked at: what a draft gives up, in seconds; and what looks have cost.
        self._lost: dict[int, float] = {}
        self._spent = 0.0

    @property
    def looking(self) -> bool:
        """Whether one is asked that does not pay by what is known of it."""
        return bool(self._lost)

    def add(self, rounds: Sequence[Round]) -> None:
        """Takes in rounds with drafts that were made within the limits."""
        for one in rounds:
            if one.asked == 1:
                continue
            # Others of the same round may have a draft of an earlier drafter, which may be longer.
            for number in {draft.number for draft in one.drafts} - {1}:
                self._drafts[number] = self._drafts.get(number, 0) + 1
                budget = min(one.budget, self._times.limits.get(number, one.budget))
                made = [draft for draft in one.drafts if draft.number == number]
                self._gains.setdefault(number, Gains()).add(budget, made)
                self._spent += self._lost.get(number, 0.0)

    def choose(self, batch: int, most: int, rate: float, seconds: float) -> None:
        """Sets the limits.

        most     γ of the chain.
        rate     tokens a second that it gains at this γ; seconds: of all rounds so far.
        """
        self._lost.clear()
        for asked, gains in self._gains.items():
            # Whose drafts always shared a round with a later drafter's were never timed.
            if self._drafts[asked] < _SEEN or not self._times.timed(asked):
                continue
            worth = _worth(self._times, gains, batch, most, rate, asked)
            best = max(range(most + 1), key=worth.__getitem__)
            look = min(_LOOK, most)
            lost = -worth[look] / rate
            if best == 0 and self._spent + lost <= _LOOKING * seconds:
                self._lost[asked], best = lost, look
            self._times.limits[asked] = best


def _worth(times: Times, gains: Gains, batch: int, most: int, rate: float, asked: int) -> list[float]:
    """Tokens that a draft of at most 0, 1, … `most` tokens brings beyond what its time would bring otherwise."""
    tokens, shares = gains.tokens(most), gains.shares(most)
    rows = times.targets(range(batch, batch + most + 1))
    steps = (share * (more - less) for share, less, more in zip(shares, rows, rows[1:], strict=False))
    widening, drafting = accumulate(steps, initial=0.0), times.unlimited(asked, most)
    return [gained - rate * (more + took) for gained, more, took in zip(tokens, widening, drafting, strict=True)]
