"""What a drafter that copies would have gained while another one drafted.

Its drafts cost next to nothing, and the text that comes shows how many of a draft's tokens were right: a copied token
is accepted as often as the target draws it, whoever drafts. So it is watched without any row of a forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.speculative.draft import CopyingDrafter, Request
from runtime.speculative.draft_length import LONGEST

# From one draft to the next, in rounds: more after each that was wrong from the beginning.
_LONGEST_PAUSE = 4
# So many tokens that were right need not wait for the rest: whoever drafts meanwhile may take a millisecond for a few.
_CLEAR = 6


@dataclass
class Shadow:
    """One text's draft that nobody verifies.

    at      the length of the text when it was made.
    tokens  of which so many were `right` as far as the text goes.
    rows    of the round that it would have been: copies are a token longer than what of them was right lately.
    passed  tokens between a wrong draft before it and this one: each would have been a round of its own.
    due     the round before which there is something to do; pause: rounds until the next draft, after a wrong one.
    """

    at: int = 0
    tokens: Sequence[int] = ()
    right: int = 0
    rows: int = 1
    passed: int = 0
    due: int = 0
    pause: int = 0

    def round(self, request: Request, drafter: CopyingDrafter[Any], number: int) -> int | None:
        """Before a round, by its number: how many tokens of a draft were right, once the text shows that, or how many
        are so far, once they are _CLEAR; else None.

        So long copies count for less than they would gain, and stretches in which copies are right for more drafts: it
        matters more that they are heard of soon.
        """
        if number < self.due:
            return None
        self.due = number + 1
        if not self.tokens:
            draft, at = drafter.draft_one(request, LONGEST), len(request.tokens)
            self.passed = at - self.at - 1 if self.at and not self.right else 0
            self.at, self.tokens, self.right, self.rows = at, draft.tokens, 0, 1
            return None if draft.tokens else self._found(0)
        text, tokens, right, at = request.tokens, self.tokens, self.right, self.at
        there = min(len(text) - at, len(tokens))
        while right < there and tokens[right] == text[at + right]:
            right += 1
        self.right = right
        if right == there < len(tokens) and right < _CLEAR:
            return None
        self.rows = 1 + min(right + 1, len(tokens))
        return self._found(right)

    def forget(self) -> None:
        """Its drafter has drafted itself: what the text became then was no round of another's."""
        self.at, self.tokens, self.right = 0, (), 0

    def _found(self, right: int) -> int:
        self.tokens = ()
        self.pause = 0 if right else min(2 * self.pause + 1, _LONGEST_PAUSE)
        self.due += self.pause
        return right
