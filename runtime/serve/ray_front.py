"""The ingress' end of the replicas: hands texts to one of them, and goes on with what it has where that is lost.

A text's bytes depend on its tokens and its seed alone, so any replica of the same fingerprint goes on with it as the
first one would have; one of another fingerprint never does. In place of `Front`, which has one engine beside it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from runtime.errors import UserError
from runtime.serve.errors import ApiError, failed, unavailable
from runtime.serve.flight import Bell, Flight, Listener
from runtime.serve.prefixes import page_digests
from runtime.serve.ray_config import ClusterConfig
from runtime.serve.ray_engine import as_error
from runtime.serve.settings import ModelSettings

_RETRY = 0.5  # seconds before a text that was begun is offered again, where replicas died or are unequal
_NONE = (0, 0, 0, 0)
_LOG = logging.getLogger("specpress.serve")


class Lost(Exception):  # noqa: N818 (a state, not a mistake)
    """The replica that wrote the text is gone, or as good as gone."""


class Unequal(Exception):  # noqa: N818
    """The replica would go on with other bytes."""


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
        tokens = list(flight.tokens)
        pages = page_digests([*flight.asked["prompt"], *tokens], flight.asked["options"].get("cache_salt") or "")
        stream = self._engines.options(stream=True).write.remote(
            flight.asked, tokens=tokens, fingerprint=flight.fingerprint, pages=pages
        )
        # A text that goes on waits for a replica of its kind, which may never come; a new one waits in the queue.
        patience = self._told.patience if flight.accepted else None
        try:
            async for event in _first_within(aiter(stream), patience):
                if flight.ended:
                    return
                self._heard(flight, event)
        except TimeoutError:
            self._none_left(flight)
        except (Lost, Unequal, ApiError):
            raise
        except DeploymentUnavailableError:
            raise unavailable("no replica can be started", "engine_down", 30) from None
        except RayTaskError as error:
            _LOG.error("%s: a replica made a mistake: %s", self.settings.name, error)
            raise failed() from None
        except (RayError, RayServeException) as error:
            raise Lost(type(error).__name__) from None
        else:
            if not flight.ended:
                raise Lost("the stream ended early")
        finally:
            with suppress(RayError, RayServeException, RuntimeError):
                stream.cancel()

    def _heard(self, flight: Flight, event: tuple[Any, ...]) -> None:
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


async def _first_within(events: AsyncIterator[Any], seconds: float | None) -> AsyncIterator[Any]:
    """The events. Raises TimeoutError where the first one does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            first = await anext(events)
    except StopAsyncIteration:
        return
    yield first
    async for event in events:
        yield event
