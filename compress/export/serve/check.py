"""Whether engines accept the keys of what was generated for them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from compress.errors import UserError
from compress.export.serve import module, sections
from compress.export.serve.parts import ConfigFile, Section, Use, documented
from compress.export.serve.run_facts import read


@dataclass(frozen=True)
class Checked:
    """One engine's result.

    keys      how many were compared; unknown: those that were found in no table, as "table: key".
    against   what they were compared with, in words.
    """

    title: str
    keys: int
    unknown: tuple[str, ...]
    against: str

    @property
    def line(self) -> str:
        """For people."""
        if not self.keys:
            return f"{self.title}: nothing to check, it does not read this model"
        verdict = f"{self.keys} keys known" if not self.unknown else f"unknown: {', '.join(self.unknown)}"
        return f"{self.title}: {verdict} ({self.against})"


def check(run: Path) -> list[Checked]:
    """Compares the keys of a run's commands, and of serve/'s files as they are now, engine by engine.

    An engine that is installed is asked itself; for tables that it does not show, and where it is not installed, the
    documented ones count. Raises UserError for a file that cannot be read.
    """
    made = sections(read(run))
    return [check_section(replace(one, files=tuple(_on_disk(run, file) for file in one.files))) for one in made]


def load(run: Path) -> Iterator[str]:
    """Has each installed engine that can be asked on this machine load the run; what to say of it, engine by engine.

    Raises UserError where one does not load what SERVE.md says that it does.
    """
    for section in sections(read(run)):
        engine = module(section.engine)
        if hasattr(engine, "load") and not isinstance(_own(engine), Exception):
            line = engine.load(run)
            if line is not None:
                yield line


def check_section(section: Section) -> Checked:
    engine = module(section.engine)
    used = dict.fromkeys(_uses(section, engine.TABLES))
    known, against = _known(engine)
    unknown = tuple(f"{table}: {key}" for table, key in used if key not in known.get(table, frozenset()))
    return Checked(section.title, len(used), unknown, against)


def _uses(section: Section, tables: Mapping[str, str]) -> Iterator[Use]:
    """What a section needs its engine to accept."""
    for command in section.commands:
        words = command.words[3:] if command.words[:2] == ("python", "-m") else command.words
        if command.table:
            yield from ((command.table, word) for word in words if word.startswith("-"))
        for option, value in pairwise(words):
            if option in tables:
                yield from _keys(tables[option], json.loads(value) if value.startswith("{") else value, tables)
    for file in section.files:
        yield from _keys(file.tables.get("", ""), file.content, {**tables, **file.tables})
    yield from section.code_uses


def _keys(table: str, value: Any, tables: Mapping[str, str]) -> Iterator[Use]:
    """The keys of a mapping, of each in a list and of what they hold; else the value, a name that the engine knows."""
    if isinstance(value, Mapping):
        yield from ((table, str(key)) for key in value if table)
        for key, item in value.items():
            yield from _keys(tables.get(key, ""), item, tables)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(table, item, tables)
    elif table and value is not None:
        yield table, str(value)


def _known(engine: ModuleType) -> tuple[Mapping[str, frozenset[str]], str]:
    recorded = documented(engine.KEY)
    tables = dict(recorded.tables) | (engine.tables() if hasattr(engine, "tables") else {})
    by_table = f"documented keys of {engine.TITLE} {recorded.version}"
    own = _own(engine)
    if isinstance(own, Exception):
        error, missing = own, isinstance(own, ImportError)
        if missing and find_spec(engine.PACKAGE) is None:
            return tables, f"{by_table}; {engine.PACKAGE} is not installed"
        how = "imported" if missing else "asked"
        return tables, f"{by_table}; {engine.PACKAGE} is installed and cannot be {how}: {_short(error)}"
    rest = sorted(set(tables) - set(own))
    also = f"; {', '.join(rest)}: {by_table}" if rest else ""
    return tables | dict(own), f"asked the installed {engine.TITLE} itself{also}"


def _own(engine: ModuleType) -> Mapping[str, frozenset[str]] | Exception:
    """What the installed engine accepts, or why it cannot be asked."""
    try:
        found: Mapping[str, frozenset[str]] = engine.installed()
    except Exception as error:  # engines ask for GPUs, programs and much else when they are looked at
        return error
    return found


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _on_disk(run: Path, file: ConfigFile) -> ConfigFile:
    """The file with its content as users may have changed it."""
    path = run / file.path
    if not path.is_file():
        return file
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if file.path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file.path} cannot be read ({_short(error)}): correct it, or delete it and export again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file.path}: expected a mapping, found something else: correct it, or delete it")
    return replace(file, content=content)
