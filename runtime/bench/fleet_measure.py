"""What one replica does, measured over HTTP."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from runtime.bench.fleet_ask import after_a_pause, ask, last_gap, random_prompts
from runtime.bench.fleet_figures import Cost, Figures, wavering
from runtime.bench.fleet_spent import Shared, Spent
from runtime.serve.worker import GAP

_SHORT = 16  # tokens of prompts that cost little
_TURNS = 3
_SINGLES = 14  # texts of one token, which tell what a request costs
_BETWEEN = 4  # such texts while another one is written
_LONGS, _LONG = 8, 512  # prompts and their tokens, in whose time the engine shows itself

_Prompts = Callable[[int, int, int], list[dict[str, Any]]]  # so many requests, of so many tokens, for so many new ones


def measure(
    address: str, batches: Sequence[int], prompt: int, new_tokens: int, shared: bool = False, passes: int = 5
) -> Figures:
    """One replica's figures, medians of so many passes; nothing else may be asked of the server meanwhile.

    address  of a server, or of a cluster's ingress with one replica; batches: texts at once, rising.
    prompt, new_tokens  of texts like those that will be asked for.
    shared   the server runs on this machine, with engines of one thread each: what is spent beside them is measured,
             too, by what the machine's cores do. They must not all be busy, and nothing else may run.

    Raises UserError where nothing answers there, a request is refused, or this system does not tell what cores do.
    """
    generator = np.random.default_rng()  # prompts that no earlier measurement left in the cache
    prompts = partial(random_prompts, generator)
    ask(address, prompts(1, _SHORT, new_tokens))  # warms up
    machine = Shared.find(lambda: _each(address, [prompts(1, _LONG, 1) for _ in range(_LONGS)])) if shared else None
    long = max(prompt, 2 * _SHORT)
    spent, gaps = [], {count: list[float]() for count in batches}
    waited = {tokens: list[float]() for tokens in (_SHORT, long)}
    # In turns, as the machine's own speed changes meanwhile.
    for _ in range(_TURNS):
        for tokens, seen in waited.items():
            seen += [after_a_pause(address, prompts(1, tokens, new_tokens))[0].first for _ in range(passes)]
        spent.append(_single(address, [prompts(1, _SHORT, 1) for _ in range(_SINGLES)], machine))
        for count in batches:
            before = Spent.now(address, machine)
            seen = [last_gap(after_a_pause(address, prompts(count, _SHORT, new_tokens))) for _ in range(passes)]
            # The engine tells of a round when GAP has passed since it last did.
            messages = passes * (count + (new_tokens - 1) / math.ceil(GAP / median(seen)))
            work = np.array([passes * count, messages, passes * count * new_tokens])
            spent.append((work, before.since(address, machine)))
            gaps[count] += seen
    firsts = {tokens: median(seen) for tokens, seen in waited.items()}
    row = max(0.0, (firsts[long] - firsts[_SHORT]) / (long - _SHORT))
    rounds = tuple((count, median(seen)) for count, seen in gaps.items())
    ingress, others = _costs(spent)
    ways = [ingress, others] if shared else [ingress]
    first = max(0.0, firsts[_SHORT] - row * _SHORT - sum(one.news(1) for one in ways))
    requests = sum(one.request for one in ways)
    # What costs more than the wait for a first token is not all spent within it.
    early = min(1.0, first / requests) if requests else 1.0
    told = Figures(first - early * requests, row, rounds, ingress, others, early)
    held = _held(address, prompts, told, min(_LONG, 4 * new_tokens), _TURNS * passes)
    alone = gaps[batches[0]]
    background = machine.background if machine is not None else 0.0
    return replace(told, background=background, held=held, waver=(wavering(alone),), steady=new_tokens * median(alone))


def _held(address: str, prompts: _Prompts, told: Figures, tokens: int, passes: int) -> float:
    """How much longer a text of so many tokens takes for each request that comes meanwhile, beyond its rows."""

    def written(due: Sequence[float]) -> float:
        bodies = prompts(1, _SHORT, tokens) + prompts(len(due), _SHORT, 1)
        one = ask(address, bodies, [0.0, *due])[0]
        return one.last - one.first

    alone, disturbed = [], []
    for _ in range(passes):
        alone.append(written([]))
        disturbed.append(written([alone[-1] * (place + 1) / (_BETWEEN + 1) for place in range(_BETWEEN)]))
    return max(0.0, (median(disturbed) - median(alone)) / _BETWEEN - told.prompt * _SHORT)


def _single(
    address: str, each: Sequence[list[dict[str, Any]]], machine: Shared | None
) -> tuple[Any, tuple[float, float]]:
    """What texts of one token cost, one after the other: little but the requests."""
    before = Spent.now(address, machine)
    _each(address, each)
    return np.array([len(each)] * 3), before.since(address, machine)


def _each(address: str, each: Sequence[list[dict[str, Any]]]) -> None:
    """Asks for these, one after the other."""
    for one in each:
        ask(address, one)


def _costs(spent: Sequence[tuple[Any, tuple[float, float]]]) -> tuple[Cost, Cost]:
    """The costs of ingress and others that explain best, by least squares, what was spent on so much work."""
    work = np.stack([one for one, _ in spent]).astype(float)
    found = []
    for place in (0, 1):
        seconds = np.array([both[place] for _, both in spent])
        used = [0, 1, 2]
        while used:  # a cost below nothing is none: the others without it
            costs, *_ = np.linalg.lstsq(work[:, used], seconds, rcond=None)
            if (costs >= 0).all():
                break
            del used[int(costs.argmin())]
        values = dict(zip(used, costs.tolist(), strict=True)) if used else {}
        found.append(Cost(*(values.get(kind, 0.0) for kind in range(3))))
    return found[0], found[1]
