"""A plan in its folder: begun, gone on with after a kill, or found finished; and what is left of it in the end."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifact import files
from compress.artifact.workspace import LOCK, locked
from compress.best.folder import CANDIDATES, check_folder, clear, discard, sweep
from compress.best.journal import NAME, Journal, open_journal
from compress.best.prepare import check_free, prepare
from compress.best.question import Question, fingerprint
from compress.best.run import Planner
from compress.errors import USER_ERRORS, UserError

if TYPE_CHECKING:
    from compress.remote.runs import Nodes


def make_plan(asked: Question, force: bool, nodes: "Nodes | None" = None) -> Path:
    """Plans, and returns the folder with best/, plan.json and plan.md.

    nodes  of a cluster, on which candidates are compressed; None: on this machine.

    Raises UserError for budgets that nothing is predicted, or was measured, to keep (with the nearest figures), and for
    a folder that holds something else.
    """
    out = asked.context.folder
    check_free(out, force)
    ready = prepare(asked)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        # Another process may have finished between the first look and the lock.
        check_folder(out, force)
        sweep(out)
        journal = open_journal(out, fingerprint(asked, ready.inputs), force)
        if journal.clearing:
            clear(out)
            journal.note(clearing=False)
        try:
            if not _is_finished(asked, journal):
                Planner(asked, ready, journal, nodes).run()
        except USER_ERRORS:
            if journal.is_empty:
                _leave(out, made)
            raise
        discard(out / CANDIDATES)
        for name in (NAME, LOCK):
            files.remove(out / name)
    return out


def _is_finished(asked: Question, journal: Journal) -> bool:
    """Whether a plan for the same is written. Raises UserError where one for something else is."""
    if journal.finished and journal.search["asked"] != asked.search():
        raise UserError(
            f"{journal.folder.name} holds a finished plan: replace it with --force, or choose another with --out"
        )
    return journal.finished


def _leave(out: Path, made: bool) -> None:
    """Leaves nothing of a plan that came to nothing before anything was measured."""
    for name in (NAME, LOCK):
        files.remove(out / name)
    if made:
        with suppress(OSError):
            out.rmdir()
