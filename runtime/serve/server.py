"""Runs the app: uvicorn on a socket of ours, models loaded first, and an orderly end."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import h11
import typer
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.errors import UserError
from runtime.serve.app import Service
from runtime.serve.errors import invalid
from runtime.serve.guard import App, Guard
from runtime.serve.metrics import Registry
from runtime.serve.models import Models
from runtime.serve.settings import Access, Limits, ModelSettings, PageSettings

_TICK = 1.0  # seconds


class Corked:
    """A transport whose writes of one turn of the event loop go out together: each call costs a switch of processes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._parts = transport, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See asyncio.Transport."""
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """See asyncio.Transport."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Protocol(H11Protocol):
    """uvicorn's own, but that what is no HTTP is told in the shape of all errors, and names no framework."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(Corked(transport))  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        """Answers, and closes."""
        body = invalid("the bytes are no HTTP request that this server reads").body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is on its way already
        if self.cycle is not None:
            # Its request may be in work, where only the body was no HTTP: whoever works on it learns that this is over.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Server(uvicorn.Server):
    """Drains at the first signal, ends at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float) -> None:
        super().__init__(config)
        self._service, self._drain = service, drain
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT."""
        self.end()

    def end(self) -> None:
        """Takes nothing more on, and ends when all texts have, or after so many seconds; called again: now."""
        if self._service.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._until_idle())

    async def _until_idle(self) -> None:
        async with asyncio.timeout(self._drain):
            try:
                while self._service.models.in_flight:
                    await asyncio.sleep(0.02)
                # The last events of the last streams are still on their way to their sockets.
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                pass
        self.should_exit = True


def listening(access: Access) -> socket.socket:
    """A socket that listens. Raises UserError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
    end = socket.socket(family, socket.SOCK_STREAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        end.bind((access.host, access.port))
        end.listen(2048)
    except OSError as error:
        end.close()
        raise UserError(
            f"{access.host} port {access.port} cannot be listened on ({error.strerror}); choose another"
        ) from None
    end.set_inheritable(False)
    return end


def http_config(app: App) -> uvicorn.Config:
    """How uvicorn runs an app of ours."""
    return uvicorn.Config(
        app,
        http=Protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=65536,
    )


def run(
    models: Sequence[ModelSettings], access: Access, limits: Limits, template: str | None, page: PageSettings
) -> None:
    """Serves until it is told to stop. Raises UserError where a model cannot be loaded, or the address not be had."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    end = listening(access)
    try:
        asyncio.run(_serve(end, models, access, limits, template, page))
    finally:
        end.close()


async def _serve(
    end: socket.socket,
    settings: Sequence[ModelSettings],
    access: Access,
    limits: Limits,
    template: str | None,
    page: PageSettings,
) -> None:
    registry = Registry()
    models = Models(registry, limits, template)
    service = Service(models, registry, limits, settings[0], page)
    server = Server(http_config(Guard(service.app(), access)), service, limits.drain)
    # Listening from the start: /health answers and /ready says 503 while the models are loaded.
    loading = asyncio.create_task(_load(models, settings, server))
    ticking = asyncio.create_task(_ticks(models))
    try:
        host, port = end.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        await asyncio.gather(server.serve([end]), _announce(loading, server, f"http://{shown}:{port}"))
    finally:
        for task in (loading, ticking):
            task.cancel()
        await models.close()


async def _load(models: Models, settings: Sequence[ModelSettings], server: Server) -> None:
    try:
        for one in settings:
            await models.load(one)
    except BaseException:
        server.should_exit = True
        raise


async def _announce(loading: "asyncio.Task[None]", server: Server, address: str) -> None:
    """Says where the server is once it is ready. Raises what loading raised."""
    while not loading.done() and not server.should_exit:
        await asyncio.wait([loading], timeout=0.1)
    if loading.done():
        loading.result()
        gc.collect()
        gc.freeze()  # as in the engine's process
        typer.echo(f"ready: {address}")
        sys.stdout.flush()


async def _ticks(models: Models) -> None:
    while True:
        await asyncio.sleep(_TICK)
        models.tick()
