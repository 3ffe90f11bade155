"""Runs on the nodes of a Ray cluster: one at a time on each, their folders brought home, and gone on with elsewhere.

What a lost node had done up to its last block is here already, so another one resumes it.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.artifact.files import write_json
from compress.artifact.journal import NAME as JOURNAL
from compress.errors import UserError
from compress.processes import Ended, Say
from compress.recipe import Recipe
from runtime.serve.ray_connection import connected

MACHINE = "machine"  # the resource of which every node has one: who holds it measures alone there
ATTEMPTS = 5
NOTES = "nodes.json"
_AHEAD = 4  # pieces on their way


@dataclass
class Nodes:
    """The cluster's nodes that runs may have.

    count  how many; notes: which run was where, from when to when by that node's clock, and how it ended.
    """

    count: int
    notes: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launch(self, command: Sequence[str], log: Path, say: Say) -> Ended:
        """A run on some node, as `compress.sweep` launches it here: compress.run's command, whose --out is of here."""
        words, out, recipe = _parsed(command)
        if "--force" in command:
            shutil.rmtree(out.with_name(f"{out.name}.partial"), ignore_errors=True)
        return self.run(words, out, recipe, log, say)

    def run(self, words: Sequence[str], out: Path, recipe: str | None, log: Path, say: Say) -> Ended:
        """The same by words without --out; `recipe`: the text of its file, where the words do not name a built-in one.

        A partial folder that is here is gone on with.
        """
        partial = out.with_name(f"{out.name}.partial")
        with log.open("w", encoding="utf-8") as file:

            def heard(line: str) -> None:
                file.write(f"{line}\n")
                file.flush()
                say(line)

            for attempt in range(ATTEMPTS):
                found = self._attempt(words, out, recipe, heard, attempt)
                if found is not None:
                    return found
                heard(f"the node is lost: {'gone on with' if partial.exists() else 'begun again'} elsewhere")
        return Ended(1, f"error: {ATTEMPTS} nodes were lost over this run")

    def _attempt(self, words: Sequence[str], out: Path, recipe: str | None, heard: Say, attempt: int) -> Ended | None:
        """How it ended on one node; None where that was lost."""
        import ray

        from compress.remote.task import run_there

        task = ray.remote(run_there).options(
            num_cpus=0, resources={MACHINE: 1}, max_retries=0, num_returns="streaming",
            _generator_backpressure_num_objects=_AHEAD, name=f"run {out.name}",
        )  # fmt: skip
        before = _folder(out.with_name(f"{out.name}.partial"))
        arriving = Arriving(out)
        note: dict[str, Any] = {"run": out.name, "attempt": attempt, "ended": None, "code": None}
        try:
            for one in task.remote(list(words), out.name, recipe, str(Path.cwd()), before):
                kind, *told = ray.get(one)
                if kind == "node":
                    note |= {"node": told[0][:12], "began": told[1]}
                elif kind == "line":
                    heard(told[0])
                elif kind == "piece":
                    arriving.take(*told)
                elif kind == "whole":
                    arriving.whole(*told)
                else:
                    code, last, note["ended"] = told
                    note["code"] = code
                    return Ended(code, last)
        except ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None
        except ray.exceptions.RayTaskError as error:
            return Ended(1, f"error: the task failed there: {error.cause}")
        except (ray.exceptions.RayError, Damaged):
            note["ended"] = time.time()
        finally:
            arriving.remove()
            with self._lock:
                self.notes.append(note)
        return None


class Damaged(Exception):  # noqa: N818 (a state, not a mistake)
    """What arrived is not what was sent."""


class Arriving:
    """A run's folder on its way here."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._folder = out.with_name(f"{out.name}.arriving")
        self._digests: dict[str, Any] = {}
        self.remove()

    def take(self, file: str, offset: int, piece: bytes) -> None:
        """A piece of a file; those of a file come in order."""
        path = (self._folder / file).resolve()
        if not path.is_relative_to(self._folder.resolve()):
            raise Damaged(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not offset:
            self._digests[file] = hashlib.sha256()
            path.unlink(missing_ok=True)  # an older one may be linked to from the partial folder
        with path.open("ab" if offset else "wb") as data:
            if data.tell() != offset:
                raise Damaged(file)
            data.write(piece)
        self._digests[file].update(piece)

    def whole(self, kind: str, files: dict[str, str]) -> None:
        """All of a folder is here: puts it in its place. Raises Damaged where a file is not what was sent."""
        for file, digest in files.items():
            if file not in self._digests or self._digests[file].hexdigest() != digest:
                raise Damaged(file)
        partial = self._out.with_name(f"{self._out.name}.partial")
        target = partial if kind == "partial" else self._out
        fresh, old = (self._out.with_name(f"{target.name}.{word}") for word in ("fresh", "old"))
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
        for file in files:
            (fresh / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(self._folder / file, fresh / file)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        if kind == "out":
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self) -> None:
        """Lets go of what arrived."""
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def nodes(address: str, notes: Path) -> Iterator[Nodes]:
    """The nodes of the cluster at the address, connected to meanwhile; in the end `notes` says what ran where.

    Raises UserError where there is no cluster, or none of its nodes lends itself to runs.
    """
    with connected(address, resources={MACHINE: 1}):
        import ray

        count = int(ray.cluster_resources().get(MACHINE, 0))
        if not count:
            raise UserError(
                f"--ray: no node of the cluster has the resource {MACHINE!r}, which one run takes: start nodes with"
                f" ray start --resources '{{\"{MACHINE}\": 1}}'"
            )
        found = Nodes(count)
        try:
            yield found
        finally:
            if found.notes:
                notes.parent.mkdir(parents=True, exist_ok=True)
                write_json(notes, {"runs": found.notes})


def _parsed(command: Sequence[str]) -> tuple[list[str], Path, str | None]:
    """(words for the node, the run folder here, the text of the recipe where it is a file's) of a sweep's command."""
    words = list(command[3:])  # without python -m compress.run
    place = words.index("--out")
    out = Path(words[place + 1])
    del words[place : place + 2]
    words = [word for word in words if word not in ("--force", "--resume")]
    place = words.index("--recipe")
    recipe = Recipe.load(words[place + 1])
    if not Path(words[place + 1]).is_file():
        return words, out, None
    del words[place : place + 2]
    return words, out, recipe.to_yaml()


def _folder(partial: Path) -> dict[str, bytes]:
    """A partial folder's files, where it can be gone on from."""
    if not (partial / JOURNAL).is_file():
        return {}
    return {str(path.relative_to(partial)): path.read_bytes() for path in partial.rglob("*") if path.is_file()}
