"""One text on its way through the engine: what was asked, enough to ask it again elsewhere, and what came of it."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from runtime.serve.errors import ApiError

GAP = 0.004  # seconds: nobody reads faster, and a small model's step takes a tenth of that


class Bell:
    """Wakes who waits for news of a request's texts.

    gap  seconds between two times that it tells of tokens.
    """

    def __init__(self, gap: float = GAP) -> None:
        self._gap = gap
        self._rung = asyncio.Event()
        self._told = 0.0
        self._later: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Wakes now."""
        self._rung.set()

    def tokens_came(self, now: float) -> None:
        """Wakes now, or `gap` seconds after the last were told: what comes faster than that is told of together."""
        if self._later is not None:
            return
        wait = self._told + self._gap - now
        if wait <= 0:
            self._rung.set()
        else:
            self._later = asyncio.get_running_loop().call_later(wait, self._late)

    def _late(self) -> None:
        self._later = None
        self._rung.set()

    async def heard(self) -> None:
        """Returns once it has rung, or at once where it rang since the last time."""
        await self._rung.wait()
        self._rung.clear()

    def told(self) -> None:
        """All that there was is told now."""
        self._told = time.monotonic()
        if self._later is not None:
            self._later.cancel()
            self._later = None


class Flight:
    """A text that was asked for.

    asked     the fields that the engine's process reads (engines.requested).
    bell      of the request that it belongs to.
    tokens    all new tokens so far; `details` of the same events: (log-probabilities, prompt's, rounds).
    finish    why it ended: stop, length or cancelled; None while it has not, or where `error` says why.
    deaths    engine processes that died while they had it.
    fingerprint  of the engine that writes it: only one of the same may go on with it.
    """

    __slots__ = (
        "accepted", "asked", "bell", "came", "deaths", "details", "error", "figures", "fingerprint", "finish", "first",
        "id", "last", "prompt_tokens", "tokens",
    )  # fmt: skip

    def __init__(self, id_: int, asked: dict[str, Any], bell: Bell, tokens: Sequence[int] = ()) -> None:
        self.id, self.asked, self.bell = id_, asked, bell
        self.prompt_tokens = len(asked["prompt"])
        self.tokens = list(tokens)
        self.fingerprint = ""
        self.details: list[Any] = []
        self.accepted = False
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.figures: dict[str, Any] = {}
        self.deaths = 0
        self.came = self.last = time.monotonic()
        self.first: float | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish is not None or self.error is not None

    @property
    def resumable(self) -> bool:
        """Whether another process would go on with the same bytes, as far as that is the request's to say."""
        rule = self.asked["options"].get("verify")
        return self.asked["sampling"].get("temperature", 0.0) == 0 or rule in (None, "coupled")


class Listener(Protocol):
    """Who counts: `metrics.Meter` does."""

    def gained(self, flight: Flight, tokens: int, now: float) -> None:
        """A text has new tokens."""

    def ended(self, flight: Flight) -> None:
        """A text has ended."""

    def figures(self, figures: dict[str, Any]) -> None:
        """What the engine counted of a text."""

    def restarted(self) -> None:
        """An engine's process died."""

    def resumed(self, texts: int) -> None:
        """So many texts go on in a new process."""

    def round(self, tokens: int) -> None:
        """A round gave so many tokens."""
