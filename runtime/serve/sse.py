"""Server-sent events: what a stream writes to its socket, and that it stops when nobody reads.

While the socket is busy nothing is written; whatever came meanwhile goes out as one chunk, so a slow reader costs no
memory but its text.
"""

import asyncio
import json
import logging
import time
from typing import Any, Protocol

from starlette.responses import Response

from runtime.serve.errors import ApiError, failed
from runtime.serve.run import ClientGone, Fresh, Progress, Receive, Run, unless_gone

PING = b": ping\n\n"
SILENCE = 0.9  # seconds; the front rings every second
DONE = b"data: [DONE]\n\n"
_LOG = logging.getLogger("specpress.serve")


def event(content: dict[str, Any]) -> bytes:
    """One event without a name: what OpenAI's completions and chats stream."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that stands in place of the rest of a stream."""
    return b"data: " + error.body + b"\n\n"


class Writer(Protocol):
    """How an endpoint tells a stream: bytes of whole events."""

    def opening(self) -> bytes:
        """Before any text."""

    def delta(self, text: Progress, fresh: Fresh) -> bytes:
        """What one of the texts gained, and that it ended."""

    def closing(self) -> bytes:
        """After all texts."""

    def error(self, error: ApiError) -> bytes:
        """In place of the rest."""


class EventStream(Response):
    """The answer to a request that asked for a stream; its texts are on their way already."""

    def __init__(self, run: Run, writer: Writer, headers: dict[str, str]) -> None:
        quiet = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(None, 200, quiet, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._run, self._writer = run, writer
        self._begun = False

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """See Starlette's Response."""
        try:
            await unless_gone(self._write(send), receive)
        except (ClientGone, OSError):
            pass
        finally:
            self._run.close()

    async def _write(self, send: Any) -> None:
        run, writer = self._run, self._writer
        waiting = writer.opening()
        spoke = time.monotonic()
        try:
            while True:
                found = await run.next()
                if found:
                    waiting += b"".join([writer.delta(text, fresh) for text, fresh in found])
                elif not waiting and time.monotonic() - spoke > SILENCE:
                    waiting = PING
                if run.ended:
                    waiting += writer.closing()
                    break
                if waiting:
                    await self._tell(send, waiting, True)
                    waiting = b""
                    spoke = time.monotonic()
        except ApiError as error:
            waiting += writer.error(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            _LOG.exception("a stream broke off")
            waiting += writer.error(failed())
        await self._tell(send, waiting, False)

    async def _tell(self, send: Any, body: bytes, more: bool) -> None:
        """Writes a piece of the body; with the first one, which is an event or a ping, the head: one packet less."""
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})
