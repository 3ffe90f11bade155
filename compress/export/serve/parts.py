"""What a page about serving is made of, and the tables of keys that engines accept."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = "serve"
HOST = "127.0.0.1"
_KEYS = Path(__file__).parent / "keys"

Use = tuple[str, str]
"""The name of a table, and a key that has to be in it."""


@dataclass(frozen=True)
class Command:
    """A line for a shell, for the run folder. about: what it is for."""

    about: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The words, quoted."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class ConfigFile:
    """A file in the run folder. path: from there on, ending in .yaml or .json; content: plain data."""

    about: str
    path: str
    content: Mapping[str, Any]

    @property
    def text(self) -> str:
        """YAML or JSON, keys in the order that they were given in."""
        if self.path.endswith(".json"):
            return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"
        # Copied, as what stands in two places would become an alias, which is no place to edit.
        copied = json.loads(json.dumps(self.content))
        return yaml.safe_dump(copied, sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True)
class Section:
    """One engine's part of the page.

    engine    its key among `ENGINES`; title: its name.
    loads     whether it reads this model in any form; why it does not stands in `lines`.
    lines     what a user has to know: what is not loaded, where, and why.
    needs     commands that make what the others use and is not there yet.
    code      Python, where the engine is a library.
    """

    engine: str
    title: str
    loads: bool
    lines: tuple[str, ...] = ()
    needs: tuple[Command, ...] = ()
    commands: tuple[Command, ...] = ()
    files: tuple[ConfigFile, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Keys:
    """The keys that a version of an engine accepts, by table. source: the files that they were read in."""

    version: str
    source: str
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)


@cache
def documented(engine: str) -> Keys:
    """The tables of keys/<engine>.json."""
    content = json.loads((_KEYS / f"{engine}.json").read_text(encoding="utf-8"))
    tables = {name: frozenset(keys) for name, keys in content["tables"].items()}
    return Keys(content["version"], content["source"], tables)


def flags(words: Iterable[str], table: str = "flags") -> list[Use]:
    """The options among a command's words."""
    return [(table, word.split("=")[0]) for word in words if word.startswith("-")]


def keys(table: str, mapping: Any) -> list[Use]:
    """The keys of a mapping; nothing for anything else."""
    return [(table, str(key)) for key in mapping] if isinstance(mapping, Mapping) else []


def compact(value: Any) -> str:
    """JSON for a command line."""
    return json.dumps(value, separators=(",", ":"))
