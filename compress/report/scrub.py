"""Keeps directories, and with them the names of users, out of reports."""

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


def display_name(name: str) -> str:
    """A hub name as it is; the last part of a directory's path."""
    path = PurePath(name)
    is_hub_name = len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", "..", "~")
    return name if is_hub_name and not Path(name).exists() else path.name or Path(name).resolve().name


def scrub_command(command: str) -> str:
    """The command with absolute paths (and those under ~) cut down to their last part."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return shlex.join(_last_part(word) for word in words)


def without_directories(value: Any) -> Any:
    """The same data with every string that is an absolute path cut down to its last part, `--key=/path` included."""
    return _with_strings(value, _last_part)


def _last_part(text: str) -> str:
    head, equals, rest = text.partition("=")
    if equals and head.startswith("--"):
        return f"{head}={_last_part(rest)}"
    return PurePath(text).name or text if text.startswith(("/", "~")) or PurePath(text).is_absolute() else text


def without_paths(value: T, paths: Iterable[Path]) -> T:
    """A sentence of a library, or a part of the report that holds some: of these `paths` only their last part stays."""
    shown = {str(path): path.name for path in paths if len(path.parts) > 1}

    def cut(text: str) -> str:
        for path, name in shown.items():
            text = text.replace(path, name)
        return text

    found: T = _with_strings(value, cut)
    return found


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same data, or part of the report, with other strings."""
    if isinstance(value, BaseModel):
        given = value.model_dump(by_alias=True, exclude_unset=True)
        return type(value).model_validate(_with_strings(given, change))
    if isinstance(value, dict):
        return {key: _with_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
