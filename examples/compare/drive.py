"""Starts the workers of one scheme and measures them in turn: only one process computes at any moment."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import HERE, environment

from runtime.bench_rounds import Sample, fastest
from runtime.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What is measured: widths and contexts in tokens; `repeats` forwards per width and round."""

    widths: tuple[int, ...]
    prefill: int
    context: int
    vocabulary: int
    rounds: int
    prefill_rounds: int
    repeats: int
    threads: int


@dataclass(frozen=True)
class Start:
    """One worker to start."""

    name: str
    module: str
    python: Path
    model: Path
    log: Path


@dataclass(frozen=True)
class Measured:
    """What one engine took: per width, and for the prefill; in the order in which it was measured."""

    name: str
    weight_bytes: int
    facts: dict[str, str]
    forwards: dict[int, list[Sample]] = field(default_factory=dict)
    prefills: list[Sample] = field(default_factory=list)


def measure(
    starts: Sequence[Start], plan: Plan, memory: Callable[[], float | None], say: Callable[[str], None]
) -> list[Measured]:
    """Rounds over all workers, each round beginning with another one; every worker measures every width in its turn.

    `memory` measures the memory's speed, between any two requests: it changes within seconds on shared machines. Raises
    UserError where a worker ends before its time.
    """
    with ExitStack() as stack:
        workers = []
        for start in starts:
            say(f"starting {start.name}")
            worker = stack.enter_context(_worker(start, plan))
            about = worker.reply()
            workers.append((worker, Measured(start.name, about["weight_bytes"], about["facts"])))
        # Every engine's first forwards, which lay weights out and compile, are left out.
        for worker, _ in workers:
            for request in _requests(plan, prefill=plan.prefill > 0, repeats=1):
                worker.ask(request)
        every = max(1, plan.rounds // plan.prefill_rounds) if plan.prefill_rounds else 0
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            due = plan.prefill > 0 and every > 0 and number % every == 0 and number // every < plan.prefill_rounds
            turn = number % len(workers)
            for worker, found in workers[turn:] + workers[:turn]:
                before = memory()
                for request in _requests(plan, due, plan.repeats):
                    ms, after = worker.ask(request)["ms"], memory()
                    samples = [Sample(one / 1e3, fastest(before, after)) for one in ms]
                    if request["do"] == "prefill":
                        found.prefills.extend(samples)
                    else:
                        found.forwards.setdefault(request["width"], []).extend(samples)
                    before = after
        return [found for _, found in workers]


def _requests(plan: Plan, prefill: bool, repeats: int) -> list[dict[str, Any]]:
    forwards = [{"do": "forward", "width": width, "repeats": repeats} for width in plan.widths]
    return forwards + ([{"do": "prefill"}] if prefill else [])


class _Worker:
    """A running worker and its two pipes."""

    def __init__(self, start: Start, process: "subprocess.Popen[str]"):
        self.start, self.process = start, process

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises UserError with the worker's last words where it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `reply` says why
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """The next line from the worker."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            last = (self.start.log.read_text(errors="replace").strip().splitlines() or ["(no message)"])[-1]
            raise UserError(f"{self.start.name} ended with exit code {code}: {last}; see {self.start.log}")
        return json.loads(line)


@contextmanager
def _worker(start: Start, plan: Plan) -> Iterator[_Worker]:
    command = [str(start.python), "-m", f"workers.{start.module}", "--model", str(start.model)]
    for name in ("threads", "context", "prefill", "vocabulary"):
        command += [f"--{name}", str(getattr(plan, name))]
    with start.log.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            env=environment(plan.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield _Worker(start, process)
        finally:
            process.kill()
            process.communicate()
