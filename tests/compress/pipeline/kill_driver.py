"""Kills runs with SIGKILL and resumes them; run as a program, so that one import serves hundreds of forks.

python kill_driver.py JOB.json: {model, recipe, text, folder, points: [n …] | "all", random: n, seed}

Point n is just before a run's n-th step of making files last: syncing, renaming, removing (compress.artifact.files).
Prints one JSON object: steps of an uninterrupted run, and for each kill where it was, and whether model/ and the
manifest were the same bytes in the end.
"""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compress import pipeline
from compress.artifact import files
from compress.artifact.manifest import NAME
from compress.recipe import Recipe

# What training imports when it begins: here once for all forks.
LATE = ("torch._dynamo", "transformers.models.llama.modeling_llama", "calib.training_text", "compress.distill.heal")
STEPS = ("sync", "rename", "remove", "sync_folder")


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Everything that the job asks for."""
    torch.set_num_threads(1)
    for module in LATE:
        importlib.import_module(module)
    folder = Path(job["folder"])
    straight, steps, seconds = folder / "straight", folder / "steps", 0.0
    if not Recipe.load(job["recipe"]).trains:
        # One run in this very process: every child would have to import again what runs import where they need it.
        # Not of what trains: autograd's threads do not live on in a child.
        compress(job, folder / "warm")
    begun = time.monotonic()
    assert finish(fork(job, straight, count_into=steps)) == 0
    seconds = time.monotonic() - begun
    count = int(steps.read_text())
    expected = content(straight)
    points = range(1, count + 1) if job["points"] == "all" else job["points"]
    kills = [kill(job, folder, expected, f"step {n} of {count}", at=n) for n in points if n <= count]
    chooser = random.Random(job["seed"])
    for _ in range(job["random"]):
        moment = chooser.uniform(0, seconds)
        kills.append(kill(job, folder, expected, f"after {moment:.2f} s", after=moment))
    return {"steps": count, "files": sorted(expected), "kills": kills}


def kill(job: dict[str, Any], folder: Path, expected: dict[str, bytes], where: str, **how: Any) -> dict[str, Any]:
    """Runs until it is killed, then resumes; what came of it."""
    out, partial = folder / "run", folder / "run.partial"
    after = how.pop("after", None)
    child = fork(job, out, **how)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    code = finish(child)
    left = sorted(path.name for path in partial.iterdir()) if partial.exists() else None
    resumed = 0
    if partial.exists():
        # Where not even the journal was there yet, there is nothing to resume and nothing in the way.
        resumed = finish(fork(job, out, resume=(partial / "journal.json").exists()))
    elif not out.exists():
        resumed = finish(fork(job, out))
    same = resumed == 0 and content(out) == expected and not list(out.glob("*.tmp"))
    result = {"where": where, "killed": code == -signal.SIGKILL, "left": left, "resumed": resumed, "same": same}
    for path in (out, partial):
        shutil.rmtree(path, ignore_errors=True)
    return result


def fork(job: dict[str, Any], out: Path, at: int = 0, count_into: Path | None = None, resume: bool = False) -> int:
    """A child that runs the recipe; `at`: killed just before its step of that number."""
    child = os.fork()
    if child:
        return child
    try:
        steps = Counter(at)
        for name in STEPS:
            steps.watch(name)
        compress(job, out, resume)
        if count_into is not None:
            count_into.write_text(str(steps.count))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def compress(job: dict[str, Any], out: Path, resume: bool = False) -> None:
    """The run that is killed."""
    small = {"calib": job["text"], "seq_len": 32, "eval_tokens": 64, "samples": 3, "shard_bytes": 100_000, "threads": 1}
    pipeline.compress(job["model"], job["recipe"], out, report=lambda *_: {}, resume=resume, **small)


class Counter:
    """Counts steps, and ends the process at one."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def watch(self, name: str) -> None:
        """Counts calls of a function of compress.artifact.files, also where another module has imported it by name."""
        original = getattr(files, name)

        def step(*given: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given)

        for module in [m for key, m in sys.modules.items() if key.startswith("compress")]:
            if getattr(module, name, None) is original:
                setattr(module, name, step)


def finish(child: int) -> int:
    """Exit status of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(out: Path) -> dict[str, bytes]:
    """What must be equal: model/, the recipe and the manifest."""
    paths = [*sorted((out / "model").rglob("*")), out / "recipe.yaml", out / NAME]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths if path.is_file()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
