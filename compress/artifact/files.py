"""Files that are either whole or not there: write beside, sync, rename.

Everything that a run writes goes through `whole`, and everything that it moves or removes through `rename` and
`remove`: tests stop a run at each of these steps in turn.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PRIVATE = 0o600


@contextmanager
def whole(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` when the block ends, or never.

    mode  permissions of the new file (the umask still counts). An OSError names `path`; what was written goes away.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            sync(file)
        rename(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        # A write to a full disk does not say which file it was.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        beside.unlink(missing_ok=True)
        raise


def sync(file: BinaryIO) -> None:
    """Makes what was written to a file last."""
    file.flush()
    os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Moves a file or folder within its file system; a file at `target` is replaced."""
    source.replace(target)


def remove(path: Path) -> None:
    """Removes a file; one that is not there is no error."""
    path.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`; after a crash the file has its old content or all of the new one."""
    with whole(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON with sorted keys: equal values give equal bytes."""
    write_atomic(path, render_json(value))


def render_json(value: Any) -> bytes:
    """The bytes that `write_json` writes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_synced(source: Path, target: Path) -> None:
    """Copies a file's content (not its permissions or times)."""
    with source.open("rb") as reader, whole(target) as writer:
        while chunk := reader.read(1 << 22):
            writer.write(chunk)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
