"""Continues the same prompts in every way, in turn: only one process computes at any moment."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from processes import Start, Worker, started
from ways import Way


@dataclass(frozen=True)
class Work:
    """What each way does in each round: `new_tokens` greedy tokens after each prompt (token ids)."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Turn:
    """One way's round: seconds and processor seconds of all prompts together, and the new tokens of each."""

    seconds: float
    cpu_seconds: float
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Decoded:
    """One way: what its engine says of itself, and its rounds in the order in which they were measured."""

    way: Way
    facts: dict[str, str]
    turns: list[Turn] = field(default_factory=list)


def decode(starts: Sequence[tuple[Start, Sequence[Way]]], work: Work, say: Callable[[str], None]) -> list[Decoded]:
    """Every way of every worker takes each prompt after the others took it; the order rotates with prompts and rounds.

    `starts` are workers with the ways that they can decode in. The first prompt is continued once before, untimed.
    Raises UserError where a worker ends before its time.
    """
    with ExitStack() as stack:
        entrants: list[tuple[Worker, Decoded]] = []
        for start, ways in starts:
            say(f"starting {start.name}")
            worker = stack.enter_context(started(start, work.threads))
            facts = worker.reply()["facts"]
            entrants += [(worker, Decoded(way, facts)) for way in ways]
        for worker, found in entrants:
            worker.ask(_request(work, 0, found.way))
        for number in range(work.rounds):
            say(f"round {number + 1} of {work.rounds}")
            replies: list[list[dict[str, Any]]] = [[] for _ in entrants]
            for prompt in range(len(work.prompts)):
                first = (number + prompt) % len(entrants)
                for i in (*range(first, len(entrants)), *range(first)):
                    worker, found = entrants[i]
                    replies[i].append(worker.ask(_request(work, prompt, found.way)))
            for (_, found), said in zip(entrants, replies, strict=True):
                found.turns.append(_turn(said))
        return [found for _, found in entrants]


def _request(work: Work, prompt: int, way: Way) -> dict[str, Any]:
    return {"prompt": list(work.prompts[prompt]), "new_tokens": work.new_tokens, "draft_length": way.draft_length}


def _turn(replies: Sequence[dict[str, Any]]) -> Turn:
    return Turn(
        seconds=sum(reply["ms"] for reply in replies) / 1e3,
        cpu_seconds=sum(reply["cpu_ms"] for reply in replies) / 1e3,
        texts=tuple(tuple(reply["tokens"]) for reply in replies),
    )
