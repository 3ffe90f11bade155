"""Drafts of copied text, as long as copying has lately gone well.

What is copied is right for a stretch and then wrong: where the last draft was accepted whole the next one mostly is,
too. So a text's draft is twice as long as the last one that was accepted whole, and otherwise one token longer than
what was accepted (transformers' assisted generation lengthens and shortens by steps instead). A controller sets the
most, by what rows and drafting cost; to it this is a drafter that often proposes less than it may.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.speculative.draft import CopyingDrafter, Draft, Drafter, Outcome, Request
from runtime.speculative.draft_length import LONGEST
from runtime.speculative.drafters.fallback import ChainedDrafter, ChosenDrafter

_FIRST = 2


@dataclass
class _Pace:
    """The most tokens of a text's next draft, and how many its last one had."""

    length: int = _FIRST
    drafted: int = 0


class PacedDrafter:
    """A drafter whose chains are cut to each text's pace."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name = drafter, drafter.name
        self._paces: dict[int, _Pace] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See Drafter."""
        paces = [self._paces.setdefault(request.id, _Pace()) for request in requests]
        most = [min(budget, pace.length) for budget, pace in zip(budgets, paces, strict=True)]
        drafts = self._drafter.propose(requests, most)
        for pace, draft in zip(paces, drafts, strict=True):
            pace.drafted = len(draft.tokens)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See Drafter."""
        for outcome in outcomes:
            pace = self._paces.get(outcome.request.id)
            if pace is None or pace.drafted == 0:
                continue
            whole = outcome.length == pace.drafted
            pace.length = min(2 * pace.length, LONGEST) if whole else outcome.length + 1
            pace.drafted = 0
        self._drafter.observe(outcomes)

    def close(self, request: Request) -> None:
        """See Drafter."""
        self._paces.pop(request.id, None)
        self._drafter.close(request)


def paced(drafter: Drafter) -> Drafter:
    """The drafter, paced where it copies, and so the parts of a chain of drafters; chains share what they shared."""
    made: dict[Drafter, Drafter] = {}

    def one(drafter: Drafter) -> Drafter:
        if isinstance(drafter, ChosenDrafter):
            return ChosenDrafter([one(part) for part in drafter.drafters], drafter)
        if isinstance(drafter, ChainedDrafter):
            return ChainedDrafter([one(part) for part in drafter.drafters])
        if not isinstance(drafter, CopyingDrafter):
            return drafter
        return made.setdefault(drafter, PacedDrafter(drafter))

    return one(drafter)
