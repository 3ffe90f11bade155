"""What texts gain, from replicas to the ingress: on TCP connections of their own beside Ray.

Ray says who gets a text and who is lost; an event that went through it would wake six of its threads. A replica
connects to each ingress that asks it for texts, once, and sends the secret that came with the first of them. Messages
follow, as channel.py writes them: each a tuple of events, (call, kind, …), of all its texts that have news. One
connection keeps them in order, and none is sent twice.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, cast

from runtime.serve.channel import framed, taken
from runtime.serve.flight import Bell

Event = tuple[Any, ...]
Place = tuple[str, int, bytes]  # host, port and secret of an ingress
GAP = 0.002  # seconds between two messages: each wakes the ingress
_SECRET = 32  # bytes
_HELLO = 10.0  # seconds that a connection has to send the secret
# Whose machine or network went without a word is noticed after so many seconds, or so many unanswered questions.
_QUIET, _ASKED_AGAIN, _UNANSWERED = 5, 5, 3


class EventServer:
    """The ingress' end, in its event loop.

    heard  is called with (connection, call, event); lost with the connection that broke.
    """

    def __init__(self, heard: Callable[[object, int, Event], None], lost: Callable[[object], None]) -> None:
        self.heard, self.lost = heard, lost
        self.secret = secrets.token_bytes(_SECRET)
        self.open: set[_Incoming] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> Place:
        """Listens on a free port of this host's address; what replicas are told."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Incoming(self), host, 0)
        return host, self._server.sockets[0].getsockname()[1], self.secret

    def close(self) -> None:
        """Lets go of all connections."""
        if self._server is not None:
            self._server.close()
        for one in list(self.open):
            one.close()


class _Incoming(asyncio.Protocol):
    """A replica's connection. What comes is read as messages only after the secret."""

    def __init__(self, server: EventServer) -> None:
        self._server, self._unread, self._known = server, bytearray(), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, where that is installed, does not say so
        self._late = asyncio.get_running_loop().call_later(_HELLO, self._transport.abort)
        self._server.open.add(self)
        keep_asking(transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._known:
            if len(self._unread) < _SECRET:
                return
            if not hmac.compare_digest(self._unread[:_SECRET], self._server.secret):
                self._transport.abort()
                return
            del self._unread[:_SECRET]
            self._known = True
            self._late.cancel()
        for message in taken(self._unread):
            for call, *event in message:
                self._server.heard(self, call, tuple(event))

    def connection_lost(self, error: Exception | None) -> None:
        self._late.cancel()
        self._server.open.discard(self)
        self._server.lost(self)

    def close(self) -> None:
        self._transport.abort()


class Telling(Protocol):
    """A text whose news a line tells."""

    def news(self) -> Iterator[Event]:
        """Events since the last time, the last one of which may be its end."""

    @property
    def told(self) -> bool:
        """Whether there is no more to come."""


class EventLine:
    """A replica's end: one ingress' texts, whose news go out together. `bell` is to be rung for each of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bell = Bell(GAP)
        self._writer = writer
        self._texts: dict[int, tuple[Telling, asyncio.Future[None]]] = {}
        self._telling = asyncio.create_task(self._tell())
        self._hearing = asyncio.create_task(self._until_closed(reader))

    @classmethod
    async def to(cls, place: Place) -> "EventLine":
        """Connects. Raises RuntimeError where that cannot be."""
        host, port, secret = place
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise RuntimeError(f"the ingress cannot be reached at {host}, port {port}: {error}") from None
        keep_asking(writer.transport)
        writer.write(secret)
        return cls(reader, writer)

    @property
    def closed(self) -> bool:
        """Whether the ingress is gone."""
        return self._writer.is_closing()

    async def tell(self, call: int, text: Telling) -> None:
        """Tells a text's news to its end. Raises ConnectionError where the ingress goes before that."""
        if self.closed:
            raise ConnectionResetError("the ingress is gone")
        ended = asyncio.get_running_loop().create_future()
        self._texts[call] = text, ended
        self.bell.ring()
        try:
            await ended
        finally:
            del self._texts[call]

    async def close(self) -> None:
        """Sends what waits, and ends."""
        self._telling.cancel()
        self._hearing.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _tell(self) -> None:
        while True:
            await self.bell.heard()
            texts = list(self._texts.items())
            events = tuple((call, *event) for call, (text, _) in texts for event in text.news())
            if not events:
                continue
            self._writer.write(framed(events))
            self.bell.told()
            for _, (text, ended) in texts:
                if text.told and not ended.done():
                    ended.set_result(None)

    async def _until_closed(self, reader: asyncio.StreamReader) -> None:
        """The ingress says nothing: what can be read is that it is gone."""
        with suppress(OSError):
            await reader.read(1)
        self._writer.close()
        for _, ended in self._texts.values():
            if not ended.done():
                ended.set_exception(ConnectionResetError("the ingress is gone"))


def keep_asking(transport: asyncio.BaseTransport) -> None:
    """Has the system ask whether the other end is still there, where its own two hours would be too long."""
    end = transport.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": _QUIET, "TCP_KEEPINTVL": _ASKED_AGAIN, "TCP_KEEPCNT": _UNANSWERED}
    wanted["TCP_USER_TIMEOUT"] = 1000 * (_QUIET + _ASKED_AGAIN * _UNANSWERED)
    for name, value in wanted.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
