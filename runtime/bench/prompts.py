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


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and the group of tasks that it stands for."""

    text: str
    group: str


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file.

    .jsonl (also .gz) has an object a line: `turns` and `category` (Spec-Bench: the first turn is the prompt), `prompt`
    and `task_id` (HumanEval: the group is what stands before the slash), or `prompt`, or `text`. Any other file has a
    prompt a line. Raises UserError for a file without prompts or with a line that is none of these.
    """
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
    task = entry.get("task_id")
    group = task.split("/")[0] if isinstance(task, str) else name
    return _text(entry.get("prompt", entry.get("text")), group)


def _text(value: Any, group: str) -> Prompt | None:
    return Prompt(value, group) if isinstance(value, str) and value.strip() else None
