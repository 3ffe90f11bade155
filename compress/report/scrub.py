"""Keeps directories, and with them the names of users, out of reports."""

import shlex
from collections.abc import Iterable
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
    return shlex.join(without_directories(word) for word in words)


def without_directories(value: Any) -> Any:
    """The same data with every string that is an absolute path cut down to its last part, `--key=/path` included."""
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_directories(item) for item in value]
    if not isinstance(value, str):
        return value
    head, equals, rest = value.partition("=")
    if equals and head.startswith("--"):
        return f"{head}={without_directories(rest)}"
    return PurePath(value).name or value if value.startswith(("/", "~")) or PurePath(value).is_absolute() else value


def without_paths(value: T, paths: Iterable[Path]) -> T:
    """A sentence of a library, or a part of the report that holds some: of these `paths` only their last part stays."""
    paths = tuple(paths)
    if isinstance(value, BaseModel):
        return type(value).model_validate(without_paths(value.model_dump(by_alias=True, exclude_unset=True), paths))
    found: Any = value
    if isinstance(value, dict):
        found = {key: without_paths(item, paths) for key, item in value.items()}
    elif isinstance(value, list):
        found = [without_paths(item, paths) for item in value]
    elif isinstance(value, str):
        for path in paths:
            if len(path.parts) > 1:
                found = found.replace(str(path), path.name)
    return found  # type: ignore[no-any-return]
