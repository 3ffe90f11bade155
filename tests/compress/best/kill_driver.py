"""Kills plans with SIGKILL and goes on with them; run as a program, so that one import serves many forks.

python kill_driver.py JOB.json: {model, text, folder, goal, kl, wanted, steps, moments, chain}: plans killed at so many
points spread over a plan's steps, over its time, and so many kills of one plan

A step is one of making files last (compress.artifact.files). Prints one JSON object: steps and seconds of a plan that
nobody disturbs, and of each kill where it was, what was left, and what was wrong in the end.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compress.best.budgets import Budgets
from compress.best.further import LEARNED, ROTATED
from compress.best.journal import NAME
from compress.best.question import Question
from compress.best.start import make_plan
from compress.context import RunContext
from compress.recipe import Recipe
from tests.compress.pipeline.kill_driver import STEPS, Counter, finish

# What depends on how fast the machine was.
TIMES = {"pace", "fastest", "ways", "forward_ms", "tokens_per_second", "rest_ms", "round_ms", "product_share"}
Found = dict[str, Any]


def main(job: dict[str, Any]) -> Found:
    """Everything that the job asks for."""
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    # In this very process: children would have to import again what plans import where they need it.
    steps = watched()
    plan(job, folder / "straight")
    count, expected = steps.count, content(folder / "straight", job["goal"])
    begun = time.monotonic()
    # Only moments need to know how long it takes once all is imported.
    assert not job["moments"] or finish(fork(job, folder / "again")) == 0
    seconds = time.monotonic() - begun
    kills = []
    for number in range(job["steps"]):
        step = 1 + round(number * (count - 1) / max(1, job["steps"] - 1))
        kills.append(kill(job, folder, expected, f"step {step} of {count}", step=step))
    for number in range(job["moments"]):
        moment = seconds * (number + 0.5) / job["moments"]
        kills.append(kill(job, folder, expected, f"after {moment:.2f} of {seconds:.2f} s", after=moment))
    if job["chain"]:
        kills.append(chain(job, folder, expected, count))
    return {"steps": count, "seconds": seconds, "kills": kills}


def chain(job: Found, folder: Path, expected: Found, count: int) -> Found:
    """Kills one plan again and again, each time after a like part of all steps, and then goes on to its end."""
    step = round(count / (job["chain"] + 0.5))
    codes = [finish(fork(job, folder / "plan", step)) for _ in range(job["chain"])]
    where = f"every {step} of {count} steps"
    return {
        "where": where,
        "killed": codes == [-signal.SIGKILL] * job["chain"],
        **ended(job, folder / "plan", expected),
    }


def kill(job: Found, folder: Path, expected: Found, where: str, step: int = 0, after: float | None = None) -> Found:
    """Plans until it is killed, and goes on with it; what came of it."""
    out = folder / "plan"
    child = fork(job, out, step)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    killed = finish(child) == -signal.SIGKILL
    return {"where": where, "killed": killed, **ended(job, out, expected)}


def ended(job: Found, out: Path, expected: Found) -> Found:
    """Goes on with a plan: what was left of it, how many candidates, and what is wrong in the end."""
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    journal = json.loads((out / NAME).read_bytes())["body"] if NAME in left else {}
    # Where the journal has gone already the plan is there, and whole.
    done = "plan.json" in left and not journal
    wrong = [] if done or (code := finish(fork(job, out))) == 0 else [f"ended with {code}"]
    if not wrong:
        found = content(out, job["goal"])
        wrong = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))
        wrong += follows(out, journal) + sorted({path.name for path in out.iterdir()} - ALL)
    shutil.rmtree(out, ignore_errors=True)
    return {"left": left, "measured": len(journal.get("measured", ())), "wrong": wrong}


# A kill in the very last step may leave the lock.
MAY_FOLLOW = {LEARNED, ROTATED}
ALL = {"best", "plan.json", "plan.md", "plan.html", "lock"} | MAY_FOLLOW


def follows(out: Path, journal: Found) -> list[str]:
    """What of the plan is not as the journal had it at the kill, times included."""
    found = json.loads((out / "plan.json").read_bytes())
    wrong = []
    for (key, measured), candidate in zip(journal.get("measured", ()), found["candidates"], strict=False):
        if key != candidate["key"] or measured["forward_ms"] != candidate["measured"]["forward_ms"]:
            wrong.append(f"candidate {key}")
    if journal.get("timed") and journal["timed"]["ways"] != found["ways"]:
        wrong.append("ways")
    if found["budgets"]["for"] == "speed":
        rates = {one["key"]: one["fastest"]["tokens_per_second"] for one in found["candidates"] if not one["broke"]}
        if max(rates, key=lambda key: rates[key]) != found["winner"]:
            wrong.append("winner")
    return wrong


def content(out: Path, goal: str) -> Found:
    """What must be equal, times left out; where speed decides, times decide about all of it."""
    if goal == "speed":
        return {}
    paths = sorted((out / "best" / "model").rglob("*"))
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    plan = json.loads((out / "plan.json").read_bytes())
    for one in plan["further"]:
        del one["seconds"], one["memory"]  # of this machine, as it was then
        if one["file"] in MAY_FOLLOW & {path.name for path in out.iterdir()}:
            files[one["file"]] = (out / one["file"]).read_bytes()
    return {**files, "plan.json": without_times(plan)}


def without_times(data: Any) -> Any:
    """The same without what depends on how fast the machine was."""
    if isinstance(data, dict):
        return {name: without_times(value) for name, value in data.items() if name not in TIMES}
    return [without_times(value) for value in data] if isinstance(data, list) else data


def fork(job: Found, out: Path, at: int = 0) -> int:
    """A child that plans; `at`: killed just before its step of that number."""
    child = os.fork()
    if child:
        return child
    try:
        watched(at)
        plan(job, out)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def watched(at: int = 0) -> Counter:
    """Steps of this process from now on."""
    steps = Counter(at)
    for name in STEPS:
        steps.watch(name)
    return steps


def plan(job: Found, out: Path) -> None:
    """The plan that is killed."""
    small: Found = {
        "calib": job["text"],
        "samples": 2,
        "seq_len": 64,
        "eval_tokens": 512,
        "new_tokens": 4,
        "threads": 1,
    }
    recipe = Recipe.load("int8-dynamic")
    context = RunContext.of(recipe, model=job["model"], out=out, baselines="none", **small)
    make_plan(Question(context, Budgets(kl=job["kl"], goal=job["goal"]), wanted=job["wanted"]), force=False)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
