"""In the engine's process: the logits of a given text, piece by piece, so that other texts' rounds run in between."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.contract import Cache, Rows, integers

if TYPE_CHECKING:
    from runtime.model.load import Model
    from runtime.speculate import CacheOptions


class Scoring:
    """Reads one text after another. Of a text that is given up, the next one takes the place."""

    def __init__(self, model: "Model", options: "CacheOptions") -> None:
        self._decoder, self._options = model.decoder, options
        self._cache: Cache | None = None
        self._handle = 0

    def piece(self, tokens: Sequence[int], first: int, count: int) -> bytes:
        """float32 logits (count, vocabulary) after the tokens first … first + count − 1, row by row.

        A text is read from its first token on, piece after piece.
        """
        if first == 0:
            self._cache = self._options.make(self._decoder)
            self._handle = self._cache.open(len(tokens))
        assert self._cache is not None and self._cache.length(self._handle) == first
        part = integers(tokens[first : first + count])
        logits = self._decoder.forward(part, Rows.chains([(self._handle, first, len(part))]), self._cache).logits
        if first + count >= len(tokens):
            self._cache = None
        return logits.float().cpu().numpy().tobytes()
