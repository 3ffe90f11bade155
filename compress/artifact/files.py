"""Files that are either whole or not there: write beside, sync, rename.

Everything that a run writes goes through `whole`, and everything that it moves or removes through `rename` and
`remove`: tests stop a run at each of these steps in turn.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from compress.errors import UserError
from runtime.files import regular

PRIVATE = 0o600


@contextmanager
def whole(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` when the block ends, or never.

    mode  permissions of the new file (the umask still counts). An OSError names `path`; what was written goes away.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        # Whatever an earlier run left, or somebody put there: opening a pipe would wait.
        beside.unlink(missing_ok=True)
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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


@dataclass(frozen=True)
class Written:
    """What a file that was just written holds: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class Digesting:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO):
        self._file, self._hash, self._bytes = file, hashlib.sha256(), 0

    def write(self, content: Any) -> None:
        """Writes bytes, or anything that has their buffer."""
        self._file.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def written(self) -> Written:
        """What went in so far."""
        return Written(self._bytes, self._hash.hexdigest())


@contextmanager
def keeping(path: Path, about: Mapping[str, Any]) -> Iterator[Digesting]:
    """A file that takes long to make: it counts once `about`, as it is at the end, lies beside it with its checksum."""
    remove(_beside(path))
    with whole(path) as opened:
        file = Digesting(opened)
        yield file
    write_json(_beside(path), {**about, "sha256": file.written().sha256})


def kept(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """What lies beside a whole file that was made with these keys; None where there is no such file."""
    try:
        about: dict[str, Any] = json.loads(regular(_beside(path)).read_bytes())
        same = all(about[name] == value for name, value in key.items()) and sha256(path) == about["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about if same else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_sealed(schema: int, body: dict[str, Any], *paths: Path) -> None:
    """The same JSON in each file, with a checksum over all of it; `schema` goes up when a key changes meaning."""
    content = _sealed(schema, body)
    for path in paths:
        write_atomic(path, content)


def read_sealed(path: Path, schema: int, advice: str) -> dict[str, Any]:
    """The body of a file that `write_sealed` wrote.

    Raises UserError for one that cannot be read, is of another schema, or of which a byte is not as it was written;
    `advice` says what to do then.
    """
    content = b""
    try:
        content = regular(path).read_bytes()
        data = json.loads(content)
        found, body = data["schema"], data["body"]
        is_whole = isinstance(body, dict) and _sealed(found, body) == content
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): start again with --force") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        found, body, is_whole = schema, {}, False
    if found != schema:
        raise UserError(f"{path}: expected schema {schema}, found {found!r}: start again with --force")
    if not is_whole:
        raise UserError(f"{path} is damaged: its content does not match its checksum{advice}")
    return body


def _sealed(schema: int, body: dict[str, Any]) -> bytes:
    # In one line: Python's own encoder, which indents, takes ten times as long for a mixture's thousands of layers.
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"schema": {json.dumps(schema)}, "sha256": "{digest}", "body": {text}}}\n'.encode()


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
