"""One run of compress.run on a node of a Ray cluster: what the task does there, and what it sends home meanwhile.

It gives tuples, in order:

    ("node", id, began)             the node, and the time there
    ("line", text)                  what the run said on standard error
    ("piece", file, offset, bytes)  of a file of the run's folder
    ("whole", kind, files)          the pieces since the last one make a folder whole: `partial`, from which another
                                    node can go on, or `out`; `files`: SHA-256 by name, of old and new ones
    ("ended", code, line, ended)    its exit code (negative: the signal), its last line, and the time
"""

import ctypes
import hashlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compress.artifact.journal import NAME as JOURNAL
from compress.artifact.workspace import LOCK

PIECE = 8_000_000  # bytes
_LOOK = 0.5  # seconds between two looks at the run's journal
_DIES_WITH_PARENT = 1  # Linux: prctl's PR_SET_PDEATHSIG

Event = tuple[Any, ...]


def run_there(
    words: Sequence[str], name: str, recipe: str | None, home: str, before: Mapping[str, bytes]
) -> Iterator[Event]:
    """Runs compress.run with these words in a folder of this node alone.

    name    of the run folder; recipe: the text of the recipe's file, where it is none of the built-in ones.
    home    the folder that paths in the words are relative to; used where the node has it, too.
    before  files of a partial folder to go on from.
    """
    import ray

    yield ("node", ray.get_runtime_context().get_node_id(), time.time())
    work = Path(tempfile.mkdtemp(prefix="specpress-"))
    try:
        out = work / name
        for file, content in before.items():
            target = out.with_name(f"{name}.partial") / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        command = [sys.executable, "-m", "compress.run", *words, "--out", str(out)]
        if recipe is not None:
            (work / "recipes").mkdir()
            (work / "recipes" / f"{name}.yaml").write_text(recipe, encoding="utf-8")
            command += ["--recipe", str(work / "recipes" / f"{name}.yaml")]
        if before:
            command.append("--resume")
        yield from _run(command, out, Path(home) if Path(home).is_dir() else work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(command: Sequence[str], out: Path, home: Path) -> Iterator[Event]:
    lines: queue.Queue[str | None] = queue.Queue()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace", cwd=home, preexec_fn=_end_with_parent,
    )  # fmt: skip
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    folder, sent, journal, last = out.with_name(f"{out.name}.partial"), dict[str, tuple[Any, str]](), b"", ""
    try:
        while (line := _next(lines)) is not None:
            if line:
                last = line.strip() or last
                yield ("line", line.rstrip())
            now = _content(folder / JOURNAL)
            if now and now != journal:
                listed = yield from _pieces(folder, sent)
                if listed is not None:
                    journal = now
                    yield ("whole", "partial", listed)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code == 0:
        listed = yield from _pieces(out, {})
        if listed is None:
            raise RuntimeError(f"{out.name}: the finished run's files changed while they were read")
        yield ("whole", "out", listed)
    yield ("ended", code, last, time.time())


def _pieces(folder: Path, sent: dict[str, tuple[Any, str]]) -> Generator[Event, None, dict[str, str] | None]:
    """The pieces of files that are new or changed; returns all files' SHA-256, or None where the run went on meanwhile.

    sent  what was sent before: size and time of the file, and its SHA-256.
    """
    before, listed = _content(folder / JOURNAL), dict[str, str]()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file = str(path.relative_to(folder))
        if path.name.endswith(".tmp") or file == LOCK:
            continue
        try:
            stat = path.stat()
            if file not in sent or sent[file][0] != (stat.st_size, stat.st_mtime_ns):
                digest = hashlib.sha256()
                with path.open("rb") as data:
                    offset = 0
                    while (piece := data.read(PIECE)) or not offset:
                        digest.update(piece)
                        yield ("piece", file, offset, piece)
                        if not piece:
                            break
                        offset += len(piece)
                sent[file] = ((stat.st_size, stat.st_mtime_ns), digest.hexdigest())
        except FileNotFoundError:
            return None
        listed[file] = sent[file][1]
    return listed if _content(folder / JOURNAL) == before else None


def _content(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.put(line)
    lines.put(None)


def _next(lines: "queue.Queue[str | None]") -> str | None:
    """The next line; "" where a while went by without one; None where there are no more."""
    try:
        return lines.get(timeout=_LOOK)
    except queue.Empty:
        return ""


def _end_with_parent() -> None:
    """The run ends with the task, however that ends: a node's worker may be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
