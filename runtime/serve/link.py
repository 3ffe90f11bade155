"""An engine's process and the channel to it: started, spoken to, heard, asked where it hangs, and let go."""

import asyncio
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from runtime.serve import worker
from runtime.serve.channel import Channel, Closed, Message
from runtime.serve.settings import ModelSettings


class Link:
    """One process. Everything here runs in the event loop; `heard` is called when there is something to read."""

    def __init__(self, settings: ModelSettings, heard: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=worker.main, args=(theirs, settings), name=f"specpress-{settings.name}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._channel = Channel(ours)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), heard)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def receive(self) -> list[Message]:
        """Messages that have come. Raises channel.Closed where the process is gone."""
        return self._channel.receive()

    def tell(self, message: Message) -> None:
        """Sends a message, now or as soon as there is room. A process that is gone is noticed by `receive`."""
        with suppress(Closed):
            self._channel.send(message)
            if self._channel.unsent:
                self._loop.add_writer(self._channel.fileno(), self._write)

    def _write(self) -> None:
        with suppress(Closed):
            self._channel.flush()
        if not self._channel.unsent:
            self._loop.remove_writer(self._channel.fileno())

    def ask_where(self) -> None:
        """Has a process that hangs tell on standard error where it does."""
        if self.pid is not None and hasattr(signal, "SIGUSR1"):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(0.1)

    def drop(self) -> int | None:
        """Ends the process, a stopped one too. Returns its exit code, where it had ended by itself."""
        self._close()
        self._process.join(0.05)
        ended = self._process.exitcode
        self._process.kill()
        self._process.join(1.0)
        return ended

    async def close(self) -> None:
        """Lets the process end, which it does when the channel is closed."""
        self._close()
        await asyncio.to_thread(self._process.join, 2.0)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    def _close(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
