"""The server's end of an engine's process: starts it, hands it texts, takes what it gives, and starts it again.

A process that dies, or says nothing for too long, costs its texts a pause: the next one goes on from their last tokens.
Whose text was there at two deaths runs alone; at the third it ends with an error, and the others go on.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from runtime.errors import UserError
from runtime.serve.channel import Closed, Message
from runtime.serve.errors import ApiError, failed, refused, unavailable
from runtime.serve.flight import Bell, Flight, Listener
from runtime.serve.link import Link
from runtime.serve.settings import ModelSettings

BACK_OFF = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a restart, by how many there were without a round between
MOST_DEATHS = 3
LONGEST_LOAD = 3600.0  # seconds
_LOG = logging.getLogger("specpress.serve")


class Front:
    """One model's engine. Everything here runs in the event loop.

    counts  (running, waiting, pages used, pages free) after the last round.
    state   loading, ready, restarting, failed or closed.
    """

    replicas: Sequence[dict[str, Any]] = ()  # of a cluster

    def __init__(self, settings: ModelSettings, listener: Listener, stall: float) -> None:
        self.settings, self._listener, self._stall = settings, listener, stall
        self.about: dict[str, Any] = {}
        self.flights: dict[int, Flight] = {}
        self.counts: tuple[int, int, int, int] = (0, 0, 0, 0)
        self.state = "loading"
        self.restarts = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._pieces: dict[int, asyncio.Future[bytes]] = {}
        self._held: list[Flight] = []  # wait for the engine, or for a suspect to end
        self._suspect: Flight | None = None
        self._failures = 0
        self._next = 0
        self._link: Link | None = None
        self._silent = 0  # ticks since it said something
        self._ready: asyncio.Future[None] | None = None
        self._revival: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the model in a new process. Raises UserError with the loader's sentence."""
        self._silent = 0
        self._ready = asyncio.get_running_loop().create_future()
        self._link = Link(self.settings, self._read)
        try:
            await asyncio.wait_for(self._ready, LONGEST_LOAD)
        except TimeoutError:
            raise UserError(f"the model was not loaded within {LONGEST_LOAD:.0f} s") from None
        finally:
            if self._ready.cancelled() or not self._ready.done() or self._ready.exception() is not None:
                self._drop()
        self.state = "ready"

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._link is None else self._link.pid

    def submit(self, asked: dict[str, Any], bell: Bell, tokens: Sequence[int] = ()) -> Flight:
        """Sends a text on its way; `tokens`: those that it has already, of an engine of the same fingerprint."""
        flight = Flight(self._next, asked, bell, tokens)
        flight.fingerprint = self.about["fingerprint"]
        self._next += 1
        self.flights[flight.id] = flight
        self.idle.clear()
        if self.state == "ready" and self._suspect is None:
            self._send(flight)
        else:
            self._held.append(flight)
        return flight

    def cancel(self, flight: Flight) -> None:
        """Ends a text that nobody wants any more; the engine lets go of it before its next round."""
        if flight.ended:
            return
        if flight in self._held:
            self._held.remove(flight)
        else:
            self._tell(("cancel", flight.id))
        self._end(flight, "cancelled")

    async def logits(self, tokens: list[int], first: int, count: int) -> bytes:
        """float32 logits after count tokens of a text from the first on: see scoring.Scoring. Raises ApiError."""
        if self.state != "ready":
            raise unavailable("an engine is starting", "engine_down", 5)
        id_, self._next = self._next, self._next + 1
        piece = self._pieces[id_] = asyncio.get_running_loop().create_future()
        self._tell(("logits", id_, tokens, first, count))
        try:
            return await piece
        finally:
            del self._pieces[id_]

    def tick(self) -> None:
        """Once a second: looks whether the process still speaks, and rings for streams that have been silent."""
        now = time.monotonic()
        # Counted in ticks: where this process was held up itself, the other one is not to blame.
        self._silent += 1
        self._read()
        if self._link is not None and self._silent > self._stall:
            _LOG.warning("%s: the engine's process has said nothing for %.0f s", self.settings.name, self._stall)
            self._link.ask_where()
            self._died()
        for flight in self.flights.values():
            if now - flight.last >= 1.0:
                flight.bell.ring()

    async def close(self) -> None:
        """Ends the process; what is in flight ends with an error."""
        self.state = "closed"
        if self._revival is not None:
            self._revival.cancel()
        self._no_pieces(unavailable("the server is shutting down", "draining", 5))
        for flight in list(self.flights.values()):
            self._fail(flight, unavailable("the server is shutting down", "draining", 5))
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # What comes from the process.

    def _read(self) -> None:
        if self._link is None:
            return
        try:
            messages = self._link.receive()
        except Closed:
            self._died()
            return
        if not messages:
            return
        self._silent = 0
        for message in messages:
            kind = message[0]
            if kind == "round":
                self._round(message)
            elif kind == "accepted":
                self._accepted(message[1])
            elif kind == "refused":
                self._refused(message[1], message[2])
            elif kind == "piece":
                self._piece(message[1], message[2])
            elif kind == "ready":
                self._loaded(message[1])
            elif kind == "failed" and self._ready is not None and not self._ready.done():
                self._ready.set_exception(UserError(message[1]))

    def _loaded(self, about: dict[str, Any]) -> None:
        if self._ready is None or self._ready.done():
            return
        known = self.about.get("fingerprint")
        if known is not None and known != about["fingerprint"]:
            self._ready.set_exception(UserError("the model's files, or the kernels that run it, have changed"))
            return
        self.about = about
        self._ready.set_result(None)

    def _accepted(self, id_: int) -> None:
        flight = self.flights.get(id_)
        if flight is not None and not flight.accepted:
            flight.accepted = True
            flight.bell.ring()

    def _refused(self, id_: int, why: str | None) -> None:
        flight = self.flights.get(id_)
        if flight is not None:
            self._fail(flight, failed() if why is None else refused(UserError(why)))

    def _piece(self, id_: int, logits: bytes | None) -> None:
        waiting = self._pieces.get(id_)
        if waiting is not None and not waiting.done():
            if logits is None:
                waiting.set_exception(failed())
            else:
                waiting.set_result(logits)

    def _no_pieces(self, error: ApiError) -> None:
        for waiting in self._pieces.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _round(self, message: Message) -> None:
        _, events, counts, now = message
        self.counts = counts
        self._failures = 0
        total = 0
        for id_, tokens, details, end in events:
            flight = self.flights.get(id_)
            if flight is None:
                if end is not None:  # cancelled meanwhile
                    self._listener.figures(end[2])
                continue
            if tokens:
                total += len(tokens)
                flight.tokens += tokens
                self._listener.gained(flight, len(tokens), now)
                flight.last = now
            if details is not None:
                flight.details.append(details)
            if end is not None:
                why, sentence, flight.figures = end
                self._listener.figures(flight.figures)
                if why == "error":
                    self._fail(flight, failed() if not sentence else _engine_error(sentence))
                elif why == "refused":
                    self._fail(flight, refused(UserError(sentence)))
                else:
                    self._end(flight, why)
            else:
                flight.bell.tokens_came(now)
        if total:
            self._listener.round(total)

    # What goes to the process.

    def _send(self, flight: Flight) -> None:
        self._tell(("add", flight.id, flight.asked | {"resumed": flight.tokens}))

    def _tell(self, message: Message) -> None:
        if self._link is not None:
            self._link.tell(message)

    # Ends.

    def _end(self, flight: Flight, why: str) -> None:
        flight.finish = why
        self._leave(flight)

    def _fail(self, flight: Flight, error: ApiError) -> None:
        flight.error = error
        self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        self.flights.pop(flight.id, None)
        if flight in self._held:
            self._held.remove(flight)
        self._listener.ended(flight)
        flight.bell.ring()
        if not self.flights:
            self.idle.set()
        if flight is self._suspect:
            self._suspect = None
            if self.state == "ready":
                self._release()

    # Deaths.

    def _drop(self) -> int | None:
        link, self._link = self._link, None
        return None if link is None else link.drop()

    def _died(self) -> None:
        """The process is gone, or as good as gone."""
        _LOG.warning("%s: the engine's process ended (exit code %s)", self.settings.name, self._drop())
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(UserError("the engine's process died while it loaded the model"))
            return
        self._no_pieces(unavailable("the engine died while it read the text: ask again", "engine_down", 5))
        self.restarts += 1
        self._listener.restarted()
        self.state = "restarting"
        held = set(map(id, self._held))
        for flight in list(self.flights.values()):
            if id(flight) in held:
                continue
            flight.deaths += 1
            if flight.deaths >= MOST_DEATHS:
                self._fail(flight, failed(f"the engine died {MOST_DEATHS} times over this request, which now ends"))
            elif flight.tokens and not (self.about.get("exact") and flight.resumable):
                self._fail(
                    flight, unavailable("the engine died, and this text cannot go on: ask again", "engine_down", 5)
                )
            else:
                self._held.append(flight)
        self._suspect = None
        self._held.sort(key=lambda flight: flight.id)
        self._revival = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Starts a process again, and again where that fails, with pauses that grow."""
        while self.state == "restarting":
            pause = BACK_OFF[min(self._failures, len(BACK_OFF) - 1)]
            self._failures += 1
            await asyncio.sleep(pause)
            try:
                await self.start()
            except UserError as error:
                _LOG.error("%s: the engine does not start again: %s", self.settings.name, error)
                self.state = "restarting"
                if self._failures >= len(BACK_OFF):
                    for flight in list(self.flights.values()):
                        self._fail(flight, unavailable("the engine does not start again", "engine_down", 30))
                continue
            self._listener.resumed(sum(1 for flight in self._held if flight.deaths))
            self._release()

    def _release(self) -> None:
        """Sends what was held: one that may be what kills the engine, alone; otherwise all."""
        suspects = [flight for flight in self._held if flight.deaths >= MOST_DEATHS - 1]
        if suspects:
            self._suspect = suspects[0]
            self._held.remove(self._suspect)
            self._send(self._suspect)
            return
        held, self._held = self._held, []
        for flight in held:
            self._send(flight)


def _engine_error(sentence: str) -> ApiError:
    """What the engine says of a request that it could not finish: no bug, and nothing that asking again mends."""
    return ApiError(500, sentence, "server_error", code="generation_failed")
