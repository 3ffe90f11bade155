"""Starts the workers of one scheme and measures them in turn: only one process computes at any moment."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from processes import Start, started

from runtime.bench.measure import Sample, fastest


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
            worker = stack.enter_context(started(start, plan.threads))
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
