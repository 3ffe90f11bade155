"""Drafting from a text that the request expects (OpenAI's `prediction`): the old form of a file to edit, say."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.speculative.draft import CopyingDrafter, Draft, Request


@dataclass
class _Place:
    """Where a text stands in its prediction.

    ends  where each n-gram of the prediction ends, in rising order, n = 1 … max_ngram.
    seen  new tokens of the text that were looked at.
    next  the index in the prediction of what should follow these.
    """

    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    seen: int = 0
    next: int = 0


class PredictionDrafter(CopyingDrafter[_Place]):
    """Proposes what follows in `Request.prediction`: from its beginning, and on from where the text stands in it.

    Where the text has left the prediction, its longest suffix of up to `max_ngram` new tokens that the prediction holds
    is looked for, behind the last place first. A request without a prediction gets no drafts.
    """

    name = "prediction"

    def __init__(self, max_ngram: int = 4) -> None:
        """Raises ValueError where max_ngram is below 1."""
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, but is {max_ngram}")
        super().__init__()
        self.max_ngram = max_ngram

    def draft_one(self, request: Request, budget: int) -> Draft:
        """An empty chain where the text is not in its prediction."""
        predicted = request.prediction
        if budget <= 0 or not predicted:
            return Draft()
        place = self._texts.get(request.id)
        if place is None:
            place = self._texts[request.id] = _Place(self._index(predicted))
        new = request.tokens[request.prompt_length + place.seen :]
        place.seen += len(new)
        if list(predicted[place.next : place.next + len(new)]) == new:
            place.next += len(new)
        elif not self._find(place, request.tokens[request.prompt_length :]):
            return Draft()
        return Draft.chain(list(predicted[place.next : place.next + budget]))

    def _index(self, predicted: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(predicted) + 1):
            for n in range(1, min(self.max_ngram, end) + 1):
                ends.setdefault(tuple(predicted[end - n : end]), []).append(end)
        return ends

    def _find(self, place: _Place, written: Sequence[int]) -> bool:
        """Goes to where the text's end is in the prediction; whether it is there."""
        for n in range(min(self.max_ngram, len(written)), 0, -1):
            ends = place.ends.get(tuple(written[-n:]))
            if ends is not None:
                place.next = ends[bisect_left(ends, place.next) % len(ends)]
                return True
        return False
