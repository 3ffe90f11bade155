"""One process at a time in an output, and files that are whole or not there."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from compress.artifact import files, workspace
from compress.artifact.workspace import LOCK, holder, locked
from compress.errors import UserError

HOLD = "import sys; from pathlib import Path; from compress.artifact.workspace import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"


def test_another_process_is_refused_and_named(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "out.partial"
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder)]
    root = str(Path(workspace.__file__).parents[2])
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for flags in ((False, False), (True, False), (False, True)):
            with pytest.raises(UserError, match=rf"out\.partial is in use by another run \(process {other.pid}\)"):
                workspace.check(out, *flags)
        with pytest.raises(UserError, match="in use"), locked(folder):
            pass
    finally:
        other.kill()
        other.communicate()
    # Killed: the system has taken the lock back.
    assert holder(folder) is None
    assert not workspace.check(out, False, False).resumed
    with locked(folder):
        assert holder(folder) == f" (process {os.getpid()})"


def test_a_folder_that_was_moved_away_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    opened = os.open

    def moving(path: Path, *rest: int) -> int:
        descriptor = opened(path, *rest)
        folder.rename(tmp_path / "out")
        return descriptor

    monkeypatch.setattr("compress.artifact.workspace.os.open", moving)
    with pytest.raises(UserError, match="in use"), locked(folder):
        pass
    monkeypatch.undo()
    assert (tmp_path / "out" / LOCK).exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space") as caught:
        files.write_atomic(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    with files.whole(path, files.PRIVATE) as file:
        file.write(b"secret")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
