"""One process at a time in a partial folder: a lock that the system takes back however the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import UserError

LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Raises UserError where another process has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # The other run may have ended, and moved its folder away, between our opening the file and locking it.
        if not _taken(descriptor) or not _is_there(descriptor, folder / LOCK):
            raise UserError(
                f"{folder.name} is in use by another run{_process(descriptor)}: wait for it, or choose another folder "
                "with --out"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(folder: Path) -> str | None:
    """None where nobody holds the folder's lock, else the process as a phrase (" (process 12)", or nothing)."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _taken(descriptor) else _process(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _process(descriptor: int) -> str:
    text = os.pread(descriptor, 20, 0).decode("ascii", "replace")
    return f" (process {text})" if text.isdecimal() else ""
