"""Messages between the server and the engine's process, over a pair of sockets: nobody waits for the other side.

A message is a tuple of Python's plain values. It travels as `marshal` writes it, after its length: both ends are the
same Python, started by the same program, and no byte of a client's gets here other than inside a text or a number.
"""

import marshal
import select
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18

Message = tuple[Any, ...]


class Closed(Exception):  # noqa: N818 (a state, not a mistake)
    """The other side is gone."""


class Channel:
    """One end. `send` never blocks: what the socket does not take waits here. Threads may send."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends a message, after those that were held, or keeps what the socket does not take now. Raises Closed."""
        data = framed(message)
        with self._lock:
            if self._unsent:
                self._unsent += data
                self._push()
                return
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise Closed from error
            if sent < len(data):
                self._unsent += data[sent:]

    def hold(self, message: Message) -> None:
        """Keeps a message until the next `send` or `flush`: a packet wakes the other side, which costs as much."""
        with self._lock:
            self._unsent += framed(message)

    def flush(self) -> None:
        """Sends more of what waits. Raises Closed."""
        with self._lock:
            self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(memoryview(self._unsent)[:_CHUNK].tobytes())
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed from error

    def receive(self) -> list[Message]:
        """The messages that are whole by now. Raises Closed."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._unread += data
        return taken(self._unread)

    def wait(self, seconds: float) -> None:
        """Returns when there is something to receive, or after so long; sends meanwhile what waits. Raises Closed."""
        _, writable, _ = select.select([self.socket], [self.socket] if self._unsent else [], [], seconds)
        if writable:
            self.flush()

    def close(self) -> None:
        self.socket.close()


def framed(message: Message) -> bytes:
    """The bytes of a message, its length first."""
    data = marshal.dumps(message)
    return _LENGTH.pack(len(data)) + data


def taken(unread: bytearray) -> list[Message]:
    """The messages that are whole in what has come by now, which is taken out of it."""
    found, start = [], 0
    while len(unread) - start >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(unread, start)
        end = start + _LENGTH.size + size
        if end > len(unread):
            break
        found.append(marshal.loads(memoryview(unread)[start + _LENGTH.size : end]))
        start = end
    if start:
        del unread[:start]
    return found
