"""The folder that a run works in, and how it becomes the output: all at once, or not at all.

Work happens in OUT.partial/ beside OUT; the last step renames it. Only folders that a run has written are replaced.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress import journal as journals
from compress import manifest
from compress.errors import USER_ERRORS, UserError
from compress.files import sync_folder
from compress.journal import Journal

# What ends a run for the user's sake. Anything else is our fault, and keeps the work.
_CLEANED: tuple[type[BaseException], ...] = (*USER_ERRORS, OSError, KeyboardInterrupt)


@dataclass(frozen=True)
class Workspace:
    """`out` is where the result goes, `folder` where it is made, `resumed` whether that was there before."""

    out: Path
    folder: Path
    resumed: bool

    def finish(self) -> None:
        """Puts the work in its place. An older run there is moved aside first and deleted last."""
        aside = self.out.with_name(self.out.name + ".replaced")
        for part in self.folder.glob("part-*.safetensors"):
            part.unlink()
        (self.folder / journals.NAME).unlink(missing_ok=True)
        replaced = self.out.exists() and any(self.out.iterdir())
        if replaced:
            self.out.rename(aside)
        try:
            self.folder.rename(self.out)
        except BaseException:
            if replaced:
                aside.rename(self.out)
            raise
        sync_folder(self.out.parent)
        if replaced:
            shutil.rmtree(aside)


def check(out: Path, resume: bool, force: bool) -> Workspace:
    """Looks whether a run may write to `out`; changes nothing.

    Raises UserError for an output that is not empty without --force, one that no run has written even with it, and a
    partial folder without --resume or --force.
    """
    out = out.resolve()
    folder = out.with_name(out.name + ".partial")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out.name}: expected a folder for the output, found a file: choose another with --out")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise UserError(f"{out.name} is not empty: replace it with --force, or choose another folder with --out")
        if not manifest.is_run_folder(out):
            raise UserError(
                f"{out.name} was not written by a run, so --force does not replace it: choose another --out"
            )
    aside = out.with_name(out.name + ".replaced")
    if aside.exists():
        raise UserError(f"{aside.name} is left from a run that was cut short while replacing: move or delete it")
    if not folder.exists():
        if resume:
            raise UserError(f"--resume: expected a run that was cut short in {folder.name}, found none: leave it out")
        return Workspace(out, folder, resumed=False)
    if not (folder / journals.NAME).is_file() and not manifest.is_run_folder(folder):
        raise UserError(f"{folder.name} is in the way and no run has written it: move or delete it")
    if not (resume or force):
        raise UserError(
            f"{folder.name} holds a run that was cut short: go on with --resume or start again with --force"
        )
    return Workspace(out, folder, resumed=resume)


@contextmanager
def opened(workspace: Workspace, fingerprint: dict[str, Any]) -> Iterator[Journal]:
    """The journal of the partial folder, begun or resumed.

    On a user's mistake, a full disk or Ctrl-C the folder is removed again, unless it is one that was resumed: that one
    is still worth what it was. Any other failure leaves it for --resume. Raises UserError where the system refuses.
    """
    folder = workspace.folder
    made = _first_missing(folder.parent)
    try:
        if workspace.resumed:
            journal = journals.resume(folder, fingerprint)
        else:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            journal = journals.begin(folder, fingerprint)
        yield journal
    except _CLEANED as error:
        if not workspace.resumed:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(folder.parent, made)
        if isinstance(error, OSError):
            kept = f"; {folder.name} is kept for --resume" if workspace.resumed else ""
            raise UserError(f"{_where(error, folder)}: {_reason(error)}{kept}") from error
        raise


def _where(error: OSError, folder: Path) -> str:
    name = error.filename if isinstance(error.filename, (str, os.PathLike)) else folder
    return str(name)


def _reason(error: OSError) -> str:
    hints = {
        errno.ENOSPC: "no space left on the device: free some or choose another place with --out",
        errno.EDQUOT: "the disk quota is used up: free some space or choose another place with --out",
        errno.EACCES: "no permission to write there: choose another place with --out",
        errno.EPERM: "no permission to write there: choose another place with --out",
        errno.EROFS: "the file system is read-only: choose another place with --out",
    }
    return hints.get(error.errno or 0, f"the system refused it ({error.strerror or error}): check the path")


def _first_missing(folder: Path) -> Path | None:
    """The topmost parent that does not exist yet, which the run is going to make."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None


def _remove_empty(folder: Path, top: Path | None) -> None:
    """Removes the folders that the run made above its own, where nothing else is in them."""
    if top is None:
        return
    for path in (folder, *folder.parents):
        with suppress(OSError):
            path.rmdir()
        if path == top:
            return
