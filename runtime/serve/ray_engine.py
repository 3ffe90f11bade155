"""A replica: an engine in a process of its own, as a server has it, whose texts are asked for by the ingress.

A text is a call through Ray that lasts as long as the text. Its events, plain tuples, go a way of their own: see
ray_events.

    ("taken", replica, fingerprint, counts)   the engine has it
    ("gained", first, tokens, details)        new tokens, of which there were `first` before; details as the engine's
    ("ended", why, tokens, figures, counts)   stop, length or cancelled, after so many tokens
    ("error", status, message, kind, param, code, retry)   it ended with an error
    ("gone",)                                 this replica ends, or its engine: another may go on
    ("unequal",)                              this replica would go on with other bytes than the text began with
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from runtime.errors import UserError
from runtime.serve.errors import ApiError
from runtime.serve.flight import Flight
from runtime.serve.front import Front
from runtime.serve.prefixes import MOST_TOLD, PAGE, Kept
from runtime.serve.ray_events import Event, EventLine, Place
from runtime.serve.settings import ModelSettings

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
        self._lines: dict[Place, asyncio.Task[EventLine]] = {}
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
        place: Place,
        call: int,
    ) -> None:
        """Writes a text to its end: what comes after `tokens`, which it has already.

        fingerprint  of the engine that began it; empty: nobody has. pages: what the text begins with, see ray_router.
        place, call  which ingress is told of it, under which number.

        Raises RuntimeError where that ingress cannot be reached, ConnectionError where it goes.
        """
        line = await self._line(place)
        about = self._front.about
        if fingerprint and fingerprint != about["fingerprint"]:
            await line.tell(call, Other())
            return
        flight = self._front.submit(asked, line.bell, tokens)
        self._kept.use(pages)
        self._turn += 1
        try:
            await line.tell(call, Text(flight, self.name, self._front))
        finally:
            self._front.cancel(flight)

    async def _line(self, place: Place) -> EventLine:
        """The connection to an ingress; the first text of it makes one, and others that come meanwhile wait for it."""
        for other, line in list(self._lines.items()):
            if line.done() and (not _is_there(line) or line.result().closed):
                del self._lines[other]
        if place not in self._lines:
            self._lines[place] = asyncio.create_task(EventLine.to(place))
        return await asyncio.shield(self._lines[place])

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
            for line in self._lines.values():
                if _is_there(line):
                    await line.result().close()


def _is_there(line: asyncio.Task[EventLine]) -> bool:
    """Whether a connection was made."""
    return line.done() and not line.cancelled() and line.exception() is None


class Text:
    """A text that this replica writes, as the ingress is told of it. See ray_events.Telling."""

    def __init__(self, flight: Flight, name: str, front: Front) -> None:
        self._flight, self._name, self._front = flight, name, front
        self._known, self._details = len(flight.tokens), 0
        self._taken = self.told = False

    def news(self) -> Iterator[Event]:
        """See ray_events.Telling."""
        flight, front = self._flight, self._front
        if flight.accepted and not self._taken:
            self._taken = True
            yield ("taken", self._name, front.about["fingerprint"], front.counts)
        if len(flight.tokens) > self._known or len(flight.details) > self._details:
            tokens, details = flight.tokens[self._known :], flight.details[self._details :]
            yield ("gained", self._known, tokens, details)
            self._known += len(tokens)
            self._details += len(details)
        if flight.ended and not self.told:
            self.told = True
            yield self._end()

    def _end(self) -> Event:
        flight, error = self._flight, self._flight.error
        if error is None:
            return ("ended", flight.finish, len(flight.tokens), flight.figures, self._front.counts)
        return ("gone",) if error.code in _PLACES else error_event(error)


class Other:
    """A text that this replica does not go on with. See ray_events.Telling."""

    told = False

    def news(self) -> Iterator[Event]:
        """See ray_events.Telling."""
        if not self.told:
            self.told = True
            yield ("unequal",)


def error_event(error: ApiError) -> Event:
    """An error as it travels; `as_error` makes it one again."""
    retry = error.headers.get("Retry-After")
    return ("error", error.status, error.message, error.kind, error.param, error.code, retry and int(retry))


def as_error(event: Event) -> ApiError:
    """What `error_event` told."""
    _, status, message, kind, param, code, retry = event
    return ApiError(status, message, kind, param, code, retry)
