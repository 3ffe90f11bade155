"""Files that are either whole or not there: write beside, sync, rename."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`; after a crash the file has its old content or all of the new one."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON with sorted keys: equal values give equal bytes."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_synced(source: Path, target: Path) -> None:
    """Copies a file's content (not its permissions or times)."""
    beside = target.with_name(target.name + ".tmp")
    with source.open("rb") as reader, beside.open("wb") as writer:
        while chunk := reader.read(1 << 22):
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    beside.replace(target)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
