"""The folder that a run works in, and how it becomes the output: all at once, or not at all.

Work happens in OUT.partial/ beside OUT, under a lock; the last step renames it. Only folders that a run has written are
replaced.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import STAGES, TRAINING, files, manifest
from compress.artifact import journal as journals
from compress.artifact.journal import Journal
from compress.errors import USER_ERRORS, UserError

LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Raises UserError where another process has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # The other run may have ended, and moved its folder away, between our opening the file and locking it.
        if not _taken(descriptor) or not _is_there(descriptor, folder / LOCK):
            raise UserError(
                f"{folder.name} is in use by another run{_process(descriptor)}: wait for it, or choose another folder "
                "with --out"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(folder: Path) -> str | None:
    """None where nobody holds the folder's lock, else the process as a phrase (" (process 12)", or nothing)."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _taken(descriptor) else _process(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _process(descriptor: int) -> str:
    text = os.pread(descriptor, 20, 0).decode("ascii", "replace")
    return f" (process {text})" if text.isdecimal() else ""


# What ends a run for the user's sake. Anything else is our fault, and keeps the work.
_CLEANED: tuple[type[BaseException], ...] = (*USER_ERRORS, OSError, KeyboardInterrupt)
# What a folder holds whose run was killed before its journal was there.
_EMPTY = {LOCK, f"{journals.NAME}.tmp"}
_WORKING = ("part-*.safetensors", "inputs-*.bin")


@dataclass(frozen=True)
class Workspace:
    """`out` is where the result goes, `folder` where it is made, `resumed` whether that was there before."""

    out: Path
    folder: Path
    resumed: bool

    def finish(self, journal: Journal) -> None:
        """Puts the work in its place. An older run there is moved aside first and deleted last.

        The journal is marked before anything goes away, so that a run that is killed in here goes on in here.
        """
        if not journal.finished:
            journal.note(finished=True)
        for pattern in _WORKING:
            for path in sorted(self.folder.glob(pattern)):
                files.remove(path)
        if (self.folder / STAGES).exists():
            shutil.rmtree(self.folder / STAGES)
        aside = _aside(self.out)
        if self.out.exists() and any(self.out.iterdir()):
            files.rename(self.out, aside)
        try:
            files.rename(self.folder, self.out)
        except OSError:
            if aside.exists():
                files.rename(aside, self.out)
            raise
        files.sync_folder(self.out.parent)
        for name in (journals.COPY, LOCK, journals.NAME):
            files.remove(self.out / name)
        if aside.exists():
            shutil.rmtree(aside)


def check(out: Path, resume: bool, force: bool) -> Workspace:
    """Looks whether a run may write to `out`; changes nothing.

    Raises UserError for an output that is not empty without --force, one that no run has written even with it, a
    partial folder that another process works in, and one without --resume or --force.
    """
    out = out.resolve()
    folder = out.with_name(out.name + ".partial")
    if (process := holder(folder)) is not None:
        raise UserError(
            f"{folder.name} is in use by another run{process}: wait for it, or choose another folder with --out"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out.name}: expected a folder for the output, found a file: choose another with --out")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            also = "--resume --force" if resume and folder.exists() else "--force"
            done = "it is finished" if resume and not folder.exists() and manifest.is_run_folder(out) else ""
            raise UserError(
                f"{out.name} is not empty{f': {done}' if done else ''}: replace it with {also}, or choose another "
                "folder with --out"
            )
        if not manifest.is_run_folder(out):
            raise UserError(
                f"{out.name} was not written by a run, so --force does not replace it: choose another --out"
            )
    # Between the two renames of `finish` the older run lies aside: then going on puts things right.
    if _aside(out).exists() and not (resume and folder.exists() and not out.exists()):
        raise UserError(f"{_aside(out).name} is left from a run that was cut short while replacing: move or delete it")
    if not folder.exists():
        if resume:
            raise UserError(f"--resume: expected a run that was cut short in {folder.name}, found none: leave it out")
        return Workspace(out, folder, resumed=False)
    begun = (folder / journals.NAME).is_file() or manifest.is_run_folder(folder)
    if not begun and (not folder.is_dir() or {path.name for path in folder.iterdir()} - _EMPTY):
        raise UserError(f"{folder.name} is in the way and no run has written it: move or delete it")
    if not (resume or force) and begun:
        raise UserError(
            f"{folder.name} holds a run that was cut short: go on with --resume or start again with --force"
        )
    return Workspace(out, folder, resumed=resume and begun)


@contextmanager
def opened(workspace: Workspace, fingerprint: dict[str, Any]) -> Iterator[Journal]:
    """The journal of the partial folder, begun or resumed, with the folder locked.

    On a user's mistake a new folder is removed again, and on a full disk or Ctrl-C one in which nothing is done yet.
    What is done stays for --resume, and the error says so. Raises UserError where the system refuses.
    """
    folder = workspace.folder
    # The topmost parent that does not exist yet, which the run is going to make.
    made = next((path for path in reversed(folder.parents) if not path.exists()), None)
    journal, ours = None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            ours = True
            if workspace.resumed:
                journal = journals.resume(folder, fingerprint)
                _sweep(folder, journal)
            else:
                _clear(folder)
                journal = journals.begin(folder, fingerprint)
            yield journal
    except _CLEANED as error:
        keep = workspace.resumed or _is_worth(journal, error)
        if not keep and ours:
            with suppress(OSError):
                _clear(folder)
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(folder.parent, made)
        if isinstance(error, OSError):
            kept = f"; {folder.name} is kept for --resume" if keep else ""
            where = error.filename if isinstance(error.filename, (str, os.PathLike)) else folder
            other = f"the system refused it ({error.strerror or error}): check the path"
            raise UserError(f"{where}: {_REASONS.get(error.errno or 0, other)}{kept}") from error
        if keep:
            error.add_note(f"{folder.name} is kept for --resume")
        raise


def _is_worth(journal: Journal | None, error: BaseException) -> bool:
    """Whether what was done before an error is to stay.

    Plain rounding takes seconds, so a mistake of the user's leaves nothing of it; calibration and training
    may have taken hours.
    """
    if journal is None:
        return False
    if journal.stages or any((journal.folder / STAGES).glob(f"*/work/**/{TRAINING}")):
        return True
    return bool(journal.parts) and (not isinstance(error, USER_ERRORS) or journal.inputs is not None)


def _sweep(folder: Path, journal: Journal) -> None:
    """Removes what a killed run has left half done: files that are not in the journal."""
    listed = {str(record["file"]) for record in journal.parts.values()}
    listed |= {str(journal.inputs["file"])} if journal.inputs else set()
    for pattern in (*_WORKING, "*.tmp"):
        for path in folder.glob(pattern):
            if path.name not in listed:
                files.remove(path)


def _clear(folder: Path) -> None:
    """Empties the folder, but for the lock: the process that holds it must find it where it was.

    The journal goes last: as long as it is there, the folder is known for a run's.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name == journals.NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            files.remove(path)


def _aside(out: Path) -> Path:
    return out.with_name(out.name + ".replaced")


_REASONS = {
    errno.ENOSPC: "no space left on the device: free some or choose another place with --out",
    errno.EDQUOT: "the disk quota is used up: free some space or choose another place with --out",
    errno.EACCES: "no permission to write there: choose another place with --out",
    errno.EPERM: "no permission to write there: choose another place with --out",
    errno.EROFS: "the file system is read-only: choose another place with --out",
}


def _remove_empty(folder: Path, top: Path | None) -> None:
    """Removes the folders that the run made above its own, where nothing else is in them."""
    if top is None:
        return
    for path in (folder, *folder.parents):
        with suppress(OSError):
            path.rmdir()
        if path == top:
            return
