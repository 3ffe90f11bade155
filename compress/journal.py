"""Which parts of a run are done, so that a run that was killed can go on.

The journal is one JSON file in the partial folder, replaced as a whole after every part (a block, or a tensor outside
the blocks) whose weights are already on disk: what it lists is there.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import UserError
from compress.files import write_json

NAME = "journal.json"
_SCHEMA = 1


@dataclass
class Journal:
    """`parts` maps each part that is done to its record (plain JSON data, with the file and its size)."""

    folder: Path
    fingerprint: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def commit(self, part: str, record: dict[str, Any]) -> None:
        """Notes that a part is done. Its file must have been written and synced before."""
        self.parts[part] = record
        self._write()

    def _write(self) -> None:
        write_json(self.folder / NAME, {"schema": _SCHEMA, "fingerprint": self.fingerprint, "parts": self.parts})


def begin(folder: Path, fingerprint: dict[str, Any]) -> Journal:
    """An empty journal, on disk. `fingerprint`: plain JSON data that everything written depends on."""
    journal = Journal(folder, fingerprint)
    journal._write()
    return journal


def resume(folder: Path, fingerprint: dict[str, Any]) -> Journal:
    """The journal of a run that was cut short.

    Raises UserError where it cannot be read, where what the run depends on has changed (naming what), or where a file
    that it lists is missing or has another size.
    """
    path = folder / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found, parts = data["fingerprint"], data["parts"]
        files = [(str(record["file"]), int(record["bytes"])) for record in parts.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}): start again with --force") from error
    if data.get("schema") != _SCHEMA:
        raise UserError(f"{path}: expected schema {_SCHEMA}, found {data.get('schema')!r}: start again with --force")
    changed = _differences(found, fingerprint)
    if changed:
        raise UserError(
            f"{folder}: --resume needs what the run was started with, but {changed}: undo the change, or start again "
            "with --force"
        )
    for name, size in files:
        if Path(name).name != name or not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise UserError(
                f"{folder / name}: expected {size} bytes as journalled, found none: start again with --force"
            )
    return Journal(folder, fingerprint, parts)


def _differences(before: Any, now: Any, path: str = "") -> str:
    """The first few differences as a phrase; empty where there are none."""
    changes = _compare(before, now, path)
    more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


def _compare(before: Any, now: Any, path: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        out = []
        for key in sorted(before.keys() | now.keys()):
            out += _compare(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        return out
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        return [c for i, (a, b) in enumerate(zip(before, now, strict=True)) for c in _compare(a, b, f"{path}.{i}")]
    return [] if before == now else [f"{path} was {before!r} and is {now!r}"]
