"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023, "prompt lookup decoding")."""

from dataclasses import dataclass, field

from runtime.speculative.draft import CopyingDrafter, Draft, Request


@dataclass
class _Index:
    """Where each n-gram of one text last ended, n = 1 … max_ngram, for ends before `indexed`."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
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
        # An n-gram that ends at the text's end is the suffix itself: it waits for its continuation.
        for end in range(index.indexed, len(tokens)):
            for n in range(1, min(self.max_ngram, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.indexed = max(index.indexed, len(tokens))
        if budget <= 0:
            return Draft()
        for n in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            start = index.ends.get(tuple(tokens[-n:]))
            if start is not None:
                period = len(tokens) - start
                return Draft.chain([tokens[start + i % period] for i in range(budget)])
        return Draft()
