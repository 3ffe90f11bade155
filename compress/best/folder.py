"""The folder of a plan: what may lie there, and what is the planner's to remove."""

import shutil
from pathlib import Path

from compress.best.journal import NAME
from compress.errors import UserError

BEST, CANDIDATES = "best", "candidates"


def check_folder(out: Path, force: bool) -> None:
    """Raises UserError for a folder that holds what no planner wrote, or a finished plan."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out.name}: expected a folder for the plan, found a file: choose another with --out")
    if not out.is_dir() or not any(path.name != "lock" for path in out.iterdir()) or (out / NAME).exists():
        return
    if not (out / "plan.json").is_file():
        raise UserError(f"{out.name} is not empty and holds no plan: choose another folder with --out")
    if not force:
        raise UserError(f"{out.name} holds a finished plan: replace it with --force, or choose another with --out")


def clear(out: Path) -> None:
    """Removes what a planner has written there, and nothing else."""
    for name in (BEST, f"{BEST}.partial", f"{BEST}.replaced", CANDIDATES):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (NAME, "plan.json", "plan.md"):
        (out / name).unlink(missing_ok=True)
