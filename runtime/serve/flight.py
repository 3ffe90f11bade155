"""One text on its way through the engine: what was asked, enough to ask it again elsewhere, and what came of it."""

import asyncio
import time
from typing import Any, Protocol

from runtime.serve.errors import ApiError


class Flight:
    """A text that was asked for.

    asked     the fields that the engine's process reads (engines.requested).
    bell      rung when something came.
    tokens    all new tokens so far; `details` of the same events: (log-probabilities, prompt's, rounds).
    finish    why it ended: stop, length or cancelled; None while it has not, or where `error` says why.
    deaths    engine processes that died while they had it.
    """

    __slots__ = (
        "accepted", "asked", "bell", "came", "deaths", "details", "error", "figures", "finish", "first", "id", "last",
        "prompt_tokens", "tokens",
    )  # fmt: skip

    def __init__(self, id_: int, asked: dict[str, Any], bell: asyncio.Event) -> None:
        self.id, self.asked, self.bell = id_, asked, bell
        self.prompt_tokens = len(asked["prompt"])
        self.tokens: list[int] = []
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
