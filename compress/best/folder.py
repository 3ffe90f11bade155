"""The folder of a plan: what may lie there, and what is the planner's to remove."""

import json
import shutil
from pathlib import Path

from compress.artifact import files
from compress.artifact import journal as runs
from compress.artifact.workspace import LOCK
from compress.best.further import LEARNED, ROTATED
from compress.best.journal import NAME, is_ours
from compress.errors import UserError

BEST, CANDIDATES = "best", "candidates"
PLAN = "plan.json"
_TEXTS = ("plan.md", "plan.html", LEARNED, ROTATED)
# What is being removed: a kill in the middle leaves no half folder where a whole one is expected.
_REMOVED = "removed"
_FOLDERS = (BEST, f"{BEST}.partial", f"{BEST}.replaced", CANDIDATES)
_WHILE_WRITING = tuple(f"{name}.tmp" for name in (NAME, PLAN, *_TEXTS))
_OURS = {*_FOLDERS, *_TEXTS, *_WHILE_WRITING, PLAN, NAME, LOCK, _REMOVED}


def check_folder(out: Path, force: bool) -> None:
    """Raises UserError for a folder that holds what no planner wrote, or a finished plan."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out.name}: expected a folder for the plan, found a file: choose another with --out")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if not names - {LOCK, f"{NAME}.tmp"}:
        return
    if NAME in names:
        # A damaged one is a planner's where nothing else is there.
        if not is_ours(out) and names - _OURS:
            raise UserError(f"{out.name}/{NAME} is not a planner's: choose another folder with --out")
        return
    if PLAN not in names or not _is_plan(out / PLAN):
        raise UserError(f"{out.name} is not empty and holds no plan: choose another folder with --out")
    if not force:
        raise UserError(f"{out.name} holds a finished plan: replace it with --force, or choose another with --out")


def _is_plan(path: Path) -> bool:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"schema", "winner", "candidates"} <= data.keys()


def clear(out: Path) -> None:
    """Removes what a planner has written there but for its journal, and nothing else."""
    for name in _FOLDERS:
        discard(out / name)
    for name in (*_TEXTS, PLAN):
        files.remove(out / name)


def discard(folder: Path) -> None:
    """Removes a folder of the planner's: at once from its place, and then for good."""
    aside = folder.parent / _REMOVED
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        files.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def sweep(out: Path) -> None:
    """Removes what a planner that was killed while it removed or wrote has left half done."""
    shutil.rmtree(out / _REMOVED, ignore_errors=True)
    for name in _WHILE_WRITING:
        files.remove(out / name)


def tidy(run: Path) -> None:
    """Removes what a run that was killed in its very last step leaves in its finished folder."""
    for name in (runs.COPY, LOCK, runs.NAME):
        files.remove(run / name)
