"""A replica: an engine in a process of its own, as a server has it, whose texts are asked for by the ingress.

A text is a call that gives events, plain tuples:

    ("taken", replica, fingerprint, counts)   the engine has it
    ("gained", first, tokens, details)        new tokens, of which there were `first` before; details as the engine's
    ("ended", why, tokens, figures, counts)   stop, length or cancelled, after so many tokens
    ("error", status, message, kind, param, code, retry)   it ended with an error
    ("gone",)                                 this replica ends, or its engine: another may go on
    ("unequal",)                              this replica would go on with other bytes than the text began with
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from runtime.errors import UserError
from runtime.serve.errors import ApiError
from runtime.serve.flight import Bell, Flight
from runtime.serve.front import Front
from runtime.serve.prefixes import MOST_TOLD, PAGE, Kept
from runtime.serve.settings import ModelSettings

Event = tuple[Any, ...]
GAP = 0.02  # seconds between two events of a text: each costs two processes of Ray a wake
_TICK = 1.0  # seconds
_PLACES = ("engine_down", "draining")  # codes of errors that are this replica's, not the text's


class Unheard:
    """A listener who counts nothing: the ingress does, for all replicas."""

    def gained(self, flight: Flight, tokens: int, now: float) -> None:
        """See flight.Listener."""

    def ended(self, flight: Flight) -> None:
        """See flight.Listener."""

    def figures(self, figures: dict[str, Any]) -> None:
        """See flight.Listener."""

    def restarted(self) -> None:
        """See flight.Listener."""

    def resumed(self, texts: int) -> None:
        """See flight.Listener."""

    def round(self, tokens: int) -> None:
        """See flight.Listener."""


class EngineReplica:
    """One engine. Ray Serve makes it, and calls it."""

    async def __init__(self, settings: ModelSettings, stall: float) -> None:  # type: ignore[misc]  # Ray awaits it
        from ray import serve

        self.name = serve.get_replica_context().replica_id.unique_id
        self._front = Front(settings, Unheard(), stall)
        try:
            await self._front.start()
        except UserError as error:
            # Ray tells this in its log and in its status, and tries elsewhere.
            raise RuntimeError(f"the engine does not start: {error}") from None
        self._kept = Kept(min(MOST_TOLD, self._front.about["pages"] or MOST_TOLD))
        self._turn = 0
        self._ticking = asyncio.create_task(self._ticks())

    async def about(self) -> dict[str, Any]:
        """What the engine's process says of the model."""
        return self._front.about

    def record_replica_metadata(self) -> dict[str, Any]:
        """See Ray Serve: what never changes, which the router knows before it sends the first text."""
        about = self._front.about
        return {"fingerprint": about["fingerprint"], "pages": about["pages"] or 0, "page": PAGE}

    def record_routing_stats(self) -> dict[str, Any]:
        """See Ray Serve: the pages that texts began with, and a number that grows with them."""
        return {"turn": self._turn, "digests": list(self._kept.pages), "counts": self._front.counts}

    def check_health(self) -> None:
        """See Ray Serve. Raises where the engine does not start again: Ray then takes another replica."""
        if self._front.state in ("failed", "closed"):
            raise RuntimeError(f"the engine is {self._front.state}")

    async def logits(self, tokens: list[int], first: int, count: int) -> bytes:
        """See Front.logits."""
        return await self._front.logits(tokens, first, count)

    async def write(
        self,
        asked: dict[str, Any],
        *,
        tokens: Sequence[int],
        fingerprint: str,
        pages: Sequence[bytes],
    ) -> AsyncIterator[Event]:
        """The events of a text, those after `tokens`, which it has already.

        fingerprint  of the engine that began it; empty: nobody has. pages: what the text begins with, see ray_router.
        """
        if fingerprint and fingerprint != self._front.about["fingerprint"]:
            yield ("unequal",)
            return
        bell, known = Bell(GAP), len(tokens)
        flight = self._front.submit(asked, bell, tokens)
        self._kept.use(pages)
        self._turn += 1
        details, told = 0, False
        try:
            while True:
                await bell.heard()
                if flight.accepted and not told:
                    told = True
                    yield ("taken", self.name, self._front.about["fingerprint"], self._front.counts)
                if len(flight.tokens) > known or len(flight.details) > details:
                    fresh, more = flight.tokens[known:], flight.details[details:]
                    first, known, details = known, known + len(fresh), details + len(more)
                    yield ("gained", first, fresh, more)
                    bell.told()
                if flight.ended:
                    yield self._end(flight)
                    return
        finally:
            self._front.cancel(flight)

    def _end(self, flight: Flight) -> Event:
        error = flight.error
        if error is None:
            return ("ended", flight.finish, len(flight.tokens), flight.figures, self._front.counts)
        if error.code in _PLACES:
            return ("gone",)
        return error_event(error)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._front.tick()

    async def __del__(self) -> None:
        if hasattr(self, "_ticking"):
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking
            await self._front.close()


def error_event(error: ApiError) -> Event:
    """An error as it travels; `as_error` makes it one again."""
    retry = error.headers.get("Retry-After")
    return ("error", error.status, error.message, error.kind, error.param, error.code, retry and int(retry))


def as_error(event: Event) -> ApiError:
    """What `error_event` told."""
    _, status, message, kind, param, code, retry = event
    return ApiError(status, message, kind, param, code, retry)
