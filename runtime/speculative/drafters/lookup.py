"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023, "prompt lookup decoding")."""

from dataclasses import dataclass, field
from typing import Any

from runtime.speculative.draft import CopyingDrafter, Draft, Request


@dataclass
class _Index:
    """Where each n-gram of one text last ended, n = 1 … max_ngram, for ends before `indexed`.

    An n-gram is its first token and the n-gram behind it, one of a single token that token: each is made of the one
    before.
    """

    ends: dict[Any, int] = field(default_factory=dict)
    indexed: int = 1


class LookupDrafter(CopyingDrafter[_Index]):
    """Proposes the continuation of the most recent earlier occurrence of the text's longest matching suffix.

    Suffixes of `max_ngram` tokens are looked for first, then shorter ones, down to one token. Where the occurrence
    overlaps the end of the text its continuation is read on into the draft, so a loop is continued as a loop. The
    proposal is deterministic. A step indexes only the tokens that came since the last one.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 4) -> None:
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, but is {max_ngram}")
        super().__init__()
        self.max_ngram = max_ngram

    def draft_one(self, request: Request, budget: int) -> Draft:
        """A chain of exactly the budget, or an empty one where no suffix has occurred before."""
        tokens = request.tokens
        index = self._texts.setdefault(request.id, _Index())
        ends, most = index.ends, self.max_ngram
        # An n-gram that ends at the text's end is the suffix itself: it waits for its continuation.
        for end in range(index.indexed, len(tokens)):
            gram: Any = tokens[end - 1]
            ends[gram] = end
            for at in range(end - 2, max(end - 1 - most, -1), -1):
                gram = tokens[at], gram
                ends[gram] = end
        index.indexed = max(index.indexed, len(tokens))
        if budget <= 0 or not tokens:
            return Draft()
        gram, start = tokens[-1], None
        # Where a suffix has not come before no longer one has.
        for at in range(len(tokens) - 2, max(len(tokens) - 2 - most, -2), -1):
            if (found := ends.get(gram)) is None:
                break
            start, gram = found, (tokens[at], gram)
        if start is None:
            return Draft()
        period = len(tokens) - start
        return Draft.chain([tokens[start + i % period] for i in range(budget)])
