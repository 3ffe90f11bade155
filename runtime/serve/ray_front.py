"""The ingress' end of the replicas: hands texts to one of them, and goes on with what it has where that is lost.

A text's bytes depend on its tokens and its seed alone, so any replica of the same fingerprint goes on with it as the
first one would have; one of another fingerprint never does. In place of `Front`, which has one engine beside it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from runtime.errors import UserError
from runtime.serve.errors import ApiError, failed, unavailable
from runtime.serve.flight import Bell, Flight, Listener
from runtime.serve.prefixes import page_digests
from runtime.serve.ray_config import ClusterConfig
from runtime.serve.ray_engine import as_error
from runtime.serve.ray_events import Event, EventServer, Place
from runtime.serve.settings import ModelSettings

_RETRY = 0.5  # seconds before a text that was begun is offered again, where replicas died or are unequal
_LATE = 10.0  # seconds between Ray's word that a text has ended and the event that says so
_NONE = (0, 0, 0, 0)
_LOG = logging.getLogger("specpress.serve")


class Lost(Exception):  # noqa: N818 (a state, not a mistake)
    """The replica that wrote the text is gone, or as good as gone."""


class Unequal(Exception):  # noqa: N818
    """The replica would go on with other bytes."""


@dataclass
class Call:
    """One replica's part of a text.

    ended       done with its last event, or with what ends it early: Lost, Unequal or ApiError.
    limit       of the time until its first event.
    connection  on which its events come, once there were some.
    """

    flight: Flight
    ended: "asyncio.Future[None]"
    limit: asyncio.Timeout
    connection: object = None


class RayFront:
    """One model's replicas. Everything here runs in the event loop; what is public is as `Front` has it.

    restarts  replicas that were lost over some text.
    """

    pid = None

    def __init__(
        self, settings: ModelSettings, listener: Listener, engines: DeploymentHandle, told: ClusterConfig
    ) -> None:
        self.settings, self._listener, self._engines, self._told = settings, listener, engines, told
        self.about: dict[str, Any] = {}
        self.flights: dict[int, Flight] = {}
        self.state = "loading"
        self.idle = asyncio.Event()
        self.idle.set()
        self._counts: dict[str, tuple[int, int, int, int]] = {}
        self._lost: set[str] = set()
        self._texts: Counter[str] = Counter()
        self._where: dict[int, str] = {}  # flight → replica
        self._writers: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, Call] = {}
        self._events = EventServer(self._told_of, self._broke)
        self._place: Place | None = None
        self._next = 0

    @property
    def restarts(self) -> int:
        """Replicas that were lost over some text."""
        return len(self._lost)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(running, waiting, pages used, pages free): the first two now, the pages as replicas told last."""
        running = sum(1 for flight in self.flights.values() if flight.accepted)
        used, free = (sum(counts[place] for counts in self._counts.values()) for place in (2, 3))
        return running, len(self.flights) - running, used, free

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Those that wrote some text: how many, pages as they told last, and whether they were lost."""
        return [
            {"id": id_, "texts": texts, "pages_used": self._counts.get(id_, _NONE)[2], "lost": id_ in self._lost}
            for id_, texts in self._texts.items()
        ]

    async def start(self) -> None:
        """Waits for a replica. Raises UserError where none is to be had."""
        try:
            about = await self._engines.about.remote()
        except (RayError, RayServeException) as error:
            raise UserError(f"no replica starts ({type(error).__name__}): see `serve status`") from None
        self._place = await self._events.start(ray.util.get_node_ip_address())
        # Of all replicas together: what the admission counts.
        self.about = about | {"max_batch": about["max_batch"] * self._told.replicas.most}
        self.state = "ready"

    def submit(self, asked: dict[str, Any], bell: Bell, tokens: Sequence[int] = ()) -> Flight:
        """Sends a text on its way."""
        flight = Flight(self._next, asked, bell, tokens)
        self._next += 1
        self.flights[flight.id] = flight
        self.idle.clear()
        self._writers[flight.id] = asyncio.create_task(self._write(flight))
        return flight

    def cancel(self, flight: Flight) -> None:
        """Ends a text that nobody wants any more."""
        if flight.ended:
            return
        self._end(flight, "cancelled")

    async def logits(self, tokens: list[int], first: int, count: int) -> bytes:
        """See Front.logits. Raises ApiError."""
        try:
            found: bytes = await self._engines.logits.remote(tokens, first, count)
        except (RayError, RayServeException):
            raise unavailable("the engine died while it read the text: ask again", "engine_down", 5) from None
        return found

    def tick(self) -> None:
        """Once a second: rings for streams that have been silent."""
        now = time.monotonic()
        for flight in self.flights.values():
            if now - flight.last >= 1.0:
                flight.bell.ring()

    async def close(self) -> None:
        """What is in flight ends with an error."""
        self.state = "closed"
        for flight in list(self.flights.values()):
            self._fail(flight, unavailable("the server is shutting down", "draining", 5))
        self._events.close()

    # A text.

    async def _write(self, flight: Flight) -> None:
        """Has a text written to its end, by as many replicas as it takes."""
        begun, losses = time.monotonic(), 0
        try:
            while not flight.ended:
                try:
                    await self._ask(flight)
                except Unequal:
                    await asyncio.sleep(_RETRY)
                except Lost:
                    begun = time.monotonic()
                    self._lost_replica(flight)
                    losses += 1
                    await asyncio.sleep(min(_RETRY, 0.01 * 2**losses))
                    continue
                if not flight.ended and flight.accepted and time.monotonic() - begun > self._told.patience:
                    self._none_left(flight)
        except asyncio.CancelledError:
            raise
        except ApiError as error:
            self._fail(flight, error)
        except Exception:
            _LOG.exception("a text broke off")
            self._fail(flight, failed())
        finally:
            self._writers.pop(flight.id, None)

    async def _ask(self, flight: Flight) -> None:
        """One replica's part of a text. Raises Lost, Unequal and ApiError."""
        number, self._next = self._next, self._next + 1
        tokens = list(flight.tokens)
        pages = page_digests([*flight.asked["prompt"], *tokens], flight.asked["options"].get("cache_salt") or "")
        # A text that goes on waits for a replica of its kind, which may never come; a new one waits in the queue.
        limit = asyncio.timeout(self._told.patience if flight.accepted else None)
        response = self._engines.write.remote(
            flight.asked, tokens=tokens, fingerprint=flight.fingerprint, pages=pages, place=self._place, call=number
        )
        call = self._calls[number] = Call(flight, asyncio.get_running_loop().create_future(), limit)
        returned = asyncio.ensure_future(_returned(response))
        try:
            async with limit:
                await asyncio.wait((call.ended, returned), return_when=asyncio.FIRST_COMPLETED)
                if not call.ended.done() and returned.exception() is None:
                    await asyncio.wait((call.ended,), timeout=_LATE)
            if call.ended.done():
                call.ended.result()
            else:
                raise returned.exception() or Lost("the text ended unheard")
        except TimeoutError:
            self._none_left(flight)
        except DeploymentUnavailableError:
            raise unavailable("no replica can be started", "engine_down", 30) from None
        except RayTaskError as error:
            if isinstance(error.cause, ConnectionError):
                raise Lost("its connection broke") from None
            _LOG.error("%s: a replica made a mistake: %s", self.settings.name, error)
            raise failed() from None
        except (RayError, RayServeException) as error:
            raise Lost(type(error).__name__) from None
        finally:
            del self._calls[number]
            returned.add_done_callback(lambda done: done.cancelled() or done.exception())
            if not (call.ended.done() and call.ended.exception() is None):
                call.ended.cancel()
                with suppress(RayError, RayServeException, RuntimeError):
                    response.cancel()

    def _told_of(self, connection: object, number: int, event: Event) -> None:
        """An event has come. What comes of a call that is over is of a text that others go on with, or nobody wants."""
        call = self._calls.get(number)
        if call is None or call.ended.done():
            return
        if call.connection not in (None, connection):
            # Ray asks another one where it believes that the first is lost, and both may write.
            call.ended.set_exception(Lost("two replicas write it"))
            return
        call.connection = connection
        if call.limit.when() is not None and not call.limit.expired():
            call.limit.reschedule(None)
        try:
            self._heard(call.flight, event)
        except (Lost, Unequal, ApiError) as error:
            call.ended.set_exception(error)
        else:
            if call.flight.ended:
                call.ended.set_result(None)

    def _broke(self, connection: object) -> None:
        """A connection is gone: its replica, or the way to it."""
        for call in self._calls.values():
            if call.connection is connection and not call.ended.done():
                call.ended.set_exception(Lost("its connection broke"))

    def _heard(self, flight: Flight, event: Event) -> None:
        now = time.monotonic()
        kind = event[0]
        if kind == "taken":
            _, replica, fingerprint, counts = event
            self._counts[replica] = counts
            self._where[flight.id], flight.fingerprint = replica, fingerprint
            self._texts[replica] += 1
            if not flight.accepted:
                flight.accepted = True
                flight.bell.ring()
        elif kind == "gained":
            _, first, tokens, details = event
            if first != len(flight.tokens):
                raise Lost(f"token {len(flight.tokens)} is missing, {first} came")
            flight.details += details
            if tokens:
                flight.tokens += tokens
                self._listener.gained(flight, len(tokens), now)
                self._listener.round(len(tokens))
                flight.last = now
                flight.bell.tokens_came(now)
        elif kind == "ended":
            _, why, tokens, flight.figures, counts = event
            if tokens != len(flight.tokens):
                raise Lost(f"{len(flight.tokens)} of {tokens} tokens came")
            self._counts[self._where[flight.id]] = counts
            self._listener.figures(flight.figures)
            self._end(flight, why)
        elif kind == "error":
            raise as_error(event)
        elif kind == "unequal":
            raise Unequal
        else:
            raise Lost("it ends")

    def _lost_replica(self, flight: Flight) -> None:
        """A text goes on elsewhere, where it may. Its replica is counted once."""
        replica = self._where.pop(flight.id, None)
        if replica is not None and replica not in self._lost:
            _LOG.warning("%s: replica %s is lost", self.settings.name, replica)
            self._lost.add(replica)
            self._counts.pop(replica, None)
            self._listener.restarted()
        if not flight.accepted:
            return  # nobody had it
        flight.deaths += 1
        if flight.deaths >= self._told.deaths:
            self._fail(flight, failed(f"{flight.deaths} replicas died over this request, which now ends"))
        elif not self._told.resume or (flight.tokens and not (self.about.get("exact") and flight.resumable)):
            self._fail(flight, unavailable("the replica died, and this text cannot go on: ask again", "engine_down", 5))
        else:
            self._listener.resumed(1)
            if not flight.tokens:
                flight.fingerprint = ""  # of what nobody has seen anybody may write

    def _none_left(self, flight: Flight) -> None:
        self._fail(
            flight,
            unavailable("no replica is left that would go on with the same bytes: ask again", "engine_down", 30),
        )

    # Ends.

    def _end(self, flight: Flight, why: str) -> None:
        flight.finish = why
        self._leave(flight)

    def _fail(self, flight: Flight, error: ApiError) -> None:
        flight.error = error
        self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        self.flights.pop(flight.id, None)
        self._where.pop(flight.id, None)
        writer = self._writers.pop(flight.id, None)
        if writer is not None and writer is not asyncio.current_task():
            writer.cancel()
        self._listener.ended(flight)
        flight.bell.ring()
        if not self.flights:
            self.idle.set()


async def _returned(response: Any) -> None:
    """Returns, or raises, as the replica's method did."""
    await response
