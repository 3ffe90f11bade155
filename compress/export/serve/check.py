"""Whether engines accept the keys of what was generated for them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from compress.errors import UserError
from compress.export.serve import module, sections
from compress.export.serve.parts import ConfigFile, Section, documented
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
    return [check_section(_as_on_disk(run, section)) for section in sections(read(run))]


def check_section(section: Section) -> Checked:
    """Compares one engine's keys."""
    engine = module(section.engine)
    used = list(dict.fromkeys(engine.uses(section))) if section.loads else []
    known, against = _known(engine)
    unknown = tuple(f"{table}: {key}" for table, key in used if key not in known.get(table, frozenset()))
    return Checked(section.title, len(used), unknown, against)


def _known(engine: ModuleType) -> tuple[Mapping[str, frozenset[str]], str]:
    recorded = documented(engine.KEY)
    tables = dict(recorded.tables) | (engine.tables() if hasattr(engine, "tables") else {})
    by_table = f"documented keys of {engine.TITLE} {recorded.version}"
    try:
        own = engine.installed()
    except ImportError as error:
        if find_spec(engine.PACKAGE) is None:
            return tables, f"{by_table}; {engine.PACKAGE} is not installed"
        return tables, f"{by_table}; {engine.PACKAGE} is installed and cannot be imported: {_short(error)}"
    except Exception as error:  # engines ask for GPUs, programs and much else when they are looked at
        return tables, f"{by_table}; {engine.PACKAGE} is installed and cannot be asked: {_short(error)}"
    rest = sorted(set(tables) - set(own))
    also = f"; {', '.join(rest)}: {by_table}" if rest else ""
    return tables | own, f"asked the installed {engine.TITLE} itself{also}"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _as_on_disk(run: Path, section: Section) -> Section:
    """The section with its files' contents as users may have changed them."""
    return replace(section, files=tuple(_read(run, file) for file in section.files))


def _read(run: Path, file: ConfigFile) -> ConfigFile:
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
