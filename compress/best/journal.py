"""What a planner has measured by now, on disk, so that one that was killed goes on with the same figures."""

import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.artifact.files import read_sealed, write_sealed
from compress.artifact.journal import differences
from compress.errors import UserError

NAME = "journal.json"
_SCHEMA = 5
_ADVICE = ": start again with --force"


@dataclass(slots=True)
class Journal:
    """Plain JSON data; what is empty is not known yet.

    question   everything that the figures depend on; budgets are not among it, so that others may be asked for.
    damages    [unit][option] (quality.py), `damages_are` measured or estimated; caches, costs, drafts: of the original.
    measured   by candidate's key: what candidates.py measured.
    timed      the contest's figures (contest.py), and between whom; winner: whose run best/ is or is to be.
    first      milliseconds to the first token of a prompt of so many tokens, by key: of the original and finalists.
    further    what may follow the winner's recipe (further.py).
    search     what candidates were last looked for: `asked`, `seconds` that went into it, and whether it is `done`.
    clearing   whether what an older plan has left is still to be removed.
    finished   whether the plan is written and only the journal and the candidates are to go.
    """

    folder: Path
    question: dict[str, Any]
    damages: list[list[float]] = field(default_factory=list)
    damages_are: str = ""
    caches: list[float] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    drafts: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    timed: dict[str, Any] = field(default_factory=dict)
    winner: str = ""
    first: dict[str, Any] = field(default_factory=dict)
    further: list[dict[str, Any]] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)
    clearing: bool = False
    finished: bool = False
    clock: float = field(default_factory=time.monotonic)

    def note(self, **changed: Any) -> None:
        """Puts new values of fields on disk, and the time that has gone by."""
        for name, value in changed.items():
            setattr(self, name, value)
        if self.search:
            self.search["seconds"] = self.seconds
        self.clock = time.monotonic()
        body = {name: getattr(self, name) for name in _FIELDS}
        # In their order, which decides among equals.
        measured = [list(one) for one in self.measured.items()]
        write_sealed(_SCHEMA, {**body, "measured": measured}, self.folder / NAME)

    @property
    def seconds(self) -> float:
        """Seconds of work on what is asked, those before a kill included."""
        return float(self.search.get("seconds", 0.0)) + time.monotonic() - self.clock

    @property
    def is_empty(self) -> bool:
        """Whether nothing is measured yet."""
        return not (self.damages or self.costs or self.drafts or self.measured)

    def begin_search(self, asked: dict[str, Any]) -> None:
        """Notes what candidates are looked for; the time of an earlier search for the same goes on."""
        if self.search.get("asked") != asked:
            self.note(search={"asked": asked, "seconds": 0.0, "done": False})


_FIELDS = tuple(one.name for one in fields(Journal) if one.name not in ("folder", "clock"))


def is_ours(folder: Path) -> bool:
    """Whether the folder's journal is a planner's, whole or with some figure changed."""
    try:
        body = json.loads((folder / NAME).read_bytes())["body"]
        return isinstance(body, dict) and {"question", "damages"} <= body.keys()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def open_journal(folder: Path, question: dict[str, Any], force: bool = False) -> Journal:
    """The folder's journal, or a new one; with `force` a new one, which says that all else is to be removed.

    Raises UserError where it is damaged, or of another question (naming what differs).
    """
    if force or not (folder / NAME).exists():
        journal = Journal(folder, question, clearing=force)
        journal.note()
        return journal
    body = read_sealed(folder / NAME, _SCHEMA, _ADVICE)
    if changed := differences(body["question"], question):
        raise UserError(
            f"{folder.name} holds a plan that was asked otherwise ({changed}): ask the same, choose another --out, or "
            "start again with --force"
        )
    return Journal(folder, **{**body, "measured": dict(body["measured"])})
