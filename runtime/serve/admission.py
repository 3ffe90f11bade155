"""How much may wait: texts and tokens, counted before anything is done for them."""

import math
import time
from collections import deque

from runtime.serve.errors import overloaded
from runtime.serve.settings import Limits

_KEPT = 64  # ends that the rate is measured over
_LONGEST_WAIT = 120  # seconds that a client is sent away for


class Admission:
    """The places of one model.

    running  texts that the engine takes at once.
    """

    def __init__(self, limits: Limits, running: int) -> None:
        self._limits, self._places = limits, running + limits.max_queued
        self.texts = 0
        self.tokens = 0
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def reserve(self, texts: int) -> None:
        """Takes places for so many texts. Raises ApiError 429 where there are too few."""
        # A request of more texts than there are places may run when it is alone.
        if self.texts and self.texts + texts > self._places:
            raise overloaded(
                f"{self.texts} texts run or wait, and {self._places} may: ask again later", self._retry_after()
            )
        self.texts += texts

    def release(self, texts: int) -> None:
        """Gives places back."""
        self.texts -= texts
        self._ends.extend([time.monotonic()] * min(texts, _KEPT))

    def queue(self, tokens: int) -> None:
        """Counts tokens of prompts that wait to be read. Raises ApiError 429 where too many do."""
        if self.tokens and self.tokens + tokens > self._limits.max_queued_tokens:
            raise overloaded(
                f"{self.tokens} tokens of prompts wait, and {self._limits.max_queued_tokens} may: ask again later",
                self._retry_after(),
            )
        self.tokens += tokens

    def unqueue(self, tokens: int) -> None:
        """They have been read, or nobody wants them any more."""
        self.tokens -= tokens

    def _retry_after(self) -> int:
        """Seconds until a tenth of the places should be free, by the rate at which texts ended lately."""
        if len(self._ends) < 2:
            return 1
        spent = max(1e-3, time.monotonic() - self._ends[0])
        return min(_LONGEST_WAIT, max(1, math.ceil(self._places / 10 / (len(self._ends) / spent))))
