"""Which parts of a run are done, so that a run that was killed can go on.

The journal is one JSON file in the partial folder with a checksum over all of it, replaced as a whole after every part
(a block, or a tensor outside the blocks) whose weights are already on disk: what it lists is there. A copy of it is
written after it, so that a damaged one can be put right by hand.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.artifact.files import read_sealed, sha256, write_sealed
from compress.errors import UserError

NAME = "journal.json"
COPY = "journal.json.copy"
_SCHEMA = 6


@dataclass(slots=True)
class Journal:
    """What is done.

    parts     each part that is done, with its record: plain JSON data with `file`, `bytes` and `sha256`.
    inputs    the activations that go into the next block: `block`, `file`, `bytes`, `sha256`, `shape` and
              `row`, what a token's numbers are.
    scan      of depth pruning: each block's influence so far, and once all are known the blocks that go.
    stages    each finished stage on the whole model: checksums of its files, and what the report says of it.
    finished  whether only moving the folder to its place is left.
    """

    folder: Path
    fingerprint: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: dict[str, Any] | None = None
    scan: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: bool = False

    def commit(self, part: str, record: dict[str, Any], inputs: dict[str, Any] | None = None) -> None:
        """Notes that a part is done, and what goes into the next one. Their files must have been written before."""
        self.parts[part] = record
        self.note(inputs=inputs or self.inputs)

    def note(self, **changed: Any) -> None:
        """Puts new values of fields on disk, those that were changed in place too."""
        for name, value in changed.items():
            setattr(self, name, value)
        body = {name: getattr(self, name) for name in _FIELDS}
        write_sealed(_SCHEMA, body, self.folder / NAME, self.folder / COPY)


_FIELDS = tuple(one.name for one in fields(Journal) if one.name != "folder")


def begin(folder: Path, fingerprint: dict[str, Any]) -> Journal:
    """An empty journal, on disk. `fingerprint`: plain JSON data that everything written depends on."""
    journal = Journal(folder, fingerprint)
    journal.note()
    return journal


def resume(folder: Path, fingerprint: dict[str, Any]) -> Journal:
    """The journal of a run that was cut short.

    Raises UserError where it cannot be read or is damaged, where what the run depends on has changed (naming what), or
    where a file that it lists is missing or is not what was written.
    """
    advice = f"; no work is lost: put {COPY} in its place and try --resume again, or start again with --force"
    body = read_sealed(folder / NAME, _SCHEMA, advice)
    changed = differences(body["fingerprint"], fingerprint)
    if changed:
        raise UserError(
            f"{folder}: --resume needs what the run was started with, but {changed}: undo the change, or start again "
            "with --force"
        )
    journal = Journal(folder, **{**body, "fingerprint": fingerprint})
    if not journal.finished:
        for record in (*journal.parts.values(), *([journal.inputs] if journal.inputs else [])):
            name = str(record["file"])
            path = folder / name
            if Path(name).name != name or not path.is_file() or path.stat().st_size != record["bytes"]:
                raise UserError(
                    f"{path}: expected {record['bytes']} bytes as journalled, found none: start again with --force"
                )
            if sha256(path) != record["sha256"]:
                raise UserError(
                    f"{path} is damaged: its content does not match the journal's checksum: start again with --force"
                )
    return journal


def differences(before: Any, now: Any, path: str = "") -> str:
    """The first few differences as a phrase; empty where there are none."""
    changes = _compare(before, now, path)
    more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


def _compare(before: Any, now: Any, path: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        both = ((key, f"{path}.{key}" if path else str(key)) for key in sorted(before.keys() | now.keys()))
        return [change for key, at in both for change in _compare(before.get(key), now.get(key), at)]
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        return [c for i, (a, b) in enumerate(zip(before, now, strict=True)) for c in _compare(a, b, f"{path}.{i}")]
    return [] if before == now else [f"{path} was {before!r} and is {now!r}"]
