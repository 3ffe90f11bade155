"""What a page about serving is made of, and the tables of keys that engines accept."""

import json
import shlex
from collections.abc import Mapping
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
    """A line for a shell, for the run folder.

    about  what it is for.
    text   its words, none of which has spaces, with spaces between.
    table  of its options; empty: they are not checked.
    """

    about: str
    text: str
    table: str = "flags"

    @property
    def words(self) -> tuple[str, ...]:
        """The words, not quoted."""
        return tuple(self.text.split())

    @property
    def line(self) -> str:
        """The words, quoted."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class ConfigFile:
    """A file in the run folder.

    path     from there on, ending in .yaml or .json.
    content  plain data.
    tables   as an engine's `TABLES`, over which they go; "": of the file's outermost keys.
    """

    about: str
    path: str
    content: Mapping[str, Any]
    tables: Mapping[str, str] = field(default_factory=dict)

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
    lines     what a user has to know: what is not loaded, where, and why.
    needs     commands that make what the others use and is not there yet.
    code      Python, where the engine is a library; code_uses: what it needs the engine to accept.
    """

    engine: str
    title: str
    lines: tuple[str, ...] = ()
    needs: tuple[Command, ...] = ()
    commands: tuple[Command, ...] = ()
    files: tuple[ConfigFile, ...] = ()
    code: str = ""
    code_uses: tuple[Use, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether the engine reads this model in any form; why it does not stands in `lines`."""
        return bool(self.commands or self.files)


@dataclass(frozen=True)
class Keys:
    """The keys that a version of an engine accepts, by table."""

    version: str
    tables: Mapping[str, frozenset[str]]


@cache
def documented(engine: str) -> Keys:
    """The tables of keys/<engine>.json."""
    content = json.loads((_KEYS / f"{engine}.json").read_text(encoding="utf-8"))
    return Keys(content["version"], {name: frozenset(keys) for name, keys in content["tables"].items()})


def compact(value: Any) -> str:
    """JSON for a command line."""
    return json.dumps(value, separators=(",", ":"))
