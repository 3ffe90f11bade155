"""Prompts for the benchmarks out of files: our own, Spec-Bench's and HumanEval's, with their task groups."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import regular

# Spec-Bench (2401.07851) counts the eight categories of MT-bench as one task.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

# What SPEED-Bench has in the place of texts that it may not hand on.
_UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and the group of tasks that it stands for."""

    text: str
    group: str


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file.

    .jsonl (also .gz) has an object a line: `turns` and `category` (Spec-Bench: the first turn is the prompt), `prompt`
    and `task_id` (HumanEval: the group is what stands before the slash), or `prompt` or `text`, also with a `category`.
    .parquet is SPEED-Bench with its texts filled in (needs pyarrow). Any other file has a prompt a line.

    Raises UserError for a file without prompts or with a line that is none of these.
    """
    if path.suffix == ".parquet":
        return _from_parquet(path)
    try:
        raw = regular(path).read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise UserError(f"--prompts: {path} cannot be read ({error}); give a text or .jsonl file in UTF-8") from error
    plain = (Prompt(line, path.stem) for line in text.splitlines() if line.strip())
    found = list(_from_json(path, text) if ".jsonl" in path.suffixes else plain)
    if not found:
        raise UserError(f"--prompts: {path} holds no prompt; write one with `python -m calib.corpora prompts`")
    return found


def _from_parquet(path: Path) -> list[Prompt]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError("--prompts: reading .parquet needs pyarrow; pip install 'specpress[data]'") from error
    try:
        rows = parquet.read_table(regular(path)).to_pylist()
    except (OSError, ArrowException) as error:
        raise UserError(
            f"--prompts: {path} cannot be read ({error}); give SPEED-Bench's .parquet or a .jsonl"
        ) from error
    # Its own categories, which are not MT-bench's.
    found = [_text((row.get("turns") or [None])[0], str(row.get("category", path.stem))) for row in rows]
    if not found or None in found:
        raise UserError(f"--prompts: {path.name} has rows without `turns`; give SPEED-Bench's file")
    if any(one is not None and one.text.startswith(_UNRESOLVED) for one in found):
        raise UserError(
            f"--prompts: {path.name} holds places for texts from other sources, which its prepare_data.py fills in; run"
            " that first"
        )
    return [one for one in found if one is not None]


def _from_json(path: Path, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"--prompts: line {number} of {path.name} is not JSON ({error.msg})") from error
        prompt = _prompt(entry, path.name.split(".")[0])
        if prompt is None:
            raise UserError(
                f"--prompts: line {number} of {path.name} has none of `turns`, `prompt` and `text` with a text in it"
            )
        yield prompt


def _prompt(entry: Any, name: str) -> Prompt | None:
    if not isinstance(entry, dict):
        return None
    turns = entry.get("turns")
    if isinstance(turns, list) and turns:
        category = str(entry.get("category", name))
        return _text(turns[0], "mt_bench" if category in _MT_BENCH else category)
    task, named = entry.get("task_id"), entry.get("category")
    group = task.split("/")[0] if isinstance(task, str) else named if isinstance(named, str) else name
    return _text(entry.get("prompt", entry.get("text")), group)


def _text(value: Any, group: str) -> Prompt | None:
    return Prompt(value, group) if isinstance(value, str) and value.strip() else None
