"""What a planner has measured by now, on disk, so that one that was killed goes on with the same figures."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.artifact.files import read_sealed, write_sealed
from compress.artifact.journal import differences
from compress.errors import UserError

NAME = "journal.json"
_SCHEMA = 1
_ADVICE = ": start again with --force"


@dataclass(slots=True)
class Journal:
    """Plain JSON data; what is empty is not known yet.

    question   everything that the figures depend on; budgets are not among it, so that others may be asked for.
    damages    [unit][option] (quality.py); costs, drafts: of the original model.
    measured   by candidate's key: what candidates.py measured.
    timed      the contest's figures (contest.py), and between whom; winner: whose run best/ is or is to be.
    """

    folder: Path
    question: dict[str, Any]
    damages: list[list[float]] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    drafts: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    timed: dict[str, Any] = field(default_factory=dict)
    winner: str = ""

    def note(self, **changed: Any) -> None:
        """Puts new values of fields on disk."""
        for name, value in changed.items():
            setattr(self, name, value)
        write_sealed(self.folder / NAME, _SCHEMA, {name: getattr(self, name) for name in _FIELDS})


_FIELDS = tuple(one.name for one in fields(Journal) if one.name != "folder")


def open_journal(folder: Path, question: dict[str, Any]) -> Journal:
    """The folder's journal, or a new one.

    Raises UserError where it is damaged, or of another question (naming what differs).
    """
    if not (folder / NAME).exists():
        journal = Journal(folder, question)
        journal.note()
        return journal
    body = read_sealed(folder / NAME, _SCHEMA, _ADVICE)
    if changed := differences(body["question"], question):
        raise UserError(
            f"{folder.name} holds a plan that was asked otherwise ({changed}): ask the same, choose another --out, or "
            "start again with --force"
        )
    return Journal(folder, **body)
