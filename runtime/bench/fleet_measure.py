"""What one replica does, measured over HTTP."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from runtime.bench.fleet_ask import after_a_pause, ask, last_gap, place_of, random_prompts, silent
from runtime.bench.fleet_figures import Cost, Figures, wavering
from runtime.errors import UserError
from runtime.serve.worker import GAP

_SHORT, _LONG = 16, 512  # tokens of the prompts whose first tokens tell what a row costs
_TURNS = 3
_SINGLES = 14  # texts of one token, which tell what a request costs
_BETWEEN = 4  # such texts while another one is written
_REST = 1.0  # seconds

_Prompts = Callable[[int, int, int], list[dict[str, Any]]]  # so many requests, of so many tokens, for so many new ones


def measure(address: str, batches: Sequence[int], new_tokens: int, shared: bool = False, passes: int = 5) -> Figures:
    """One replica's figures, medians of so many passes; nothing else may be asked of the server meanwhile.

    address  of a server, or of a cluster's ingress with one replica; batches: texts at once, rising.
    shared   the server runs on this machine, with engines of one thread each: what is spent beside them is measured,
             too, by what the machine's cores do. They must not all be busy, and nothing else may run.

    Raises UserError where nothing answers there, a request is refused, or this system does not tell what cores do.
    """
    generator = np.random.default_rng()  # prompts that no earlier measurement left in the cache
    prompts = partial(random_prompts, generator)
    ask(address, prompts(1, _SHORT, new_tokens))  # warms up
    firsts = {
        tokens: median(after_a_pause(address, prompts(1, tokens, new_tokens))[0].first for _ in range(2 * passes))
        for tokens in (_SHORT, _LONG)
    }
    row = max(0.0, (firsts[_LONG] - firsts[_SHORT]) / (_LONG - _SHORT))
    spent, gaps = [], {count: list[float]() for count in batches}
    # In turns, as the machine's own speed changes meanwhile.
    for _ in range(_TURNS):
        spent.append(_single(address, [prompts(1, _SHORT, 1) for _ in range(_SINGLES)], row, shared))
        for count in batches:
            before = _Spent.now(address, shared)
            seen = [last_gap(after_a_pause(address, prompts(count, _SHORT, new_tokens))) for _ in range(passes)]
            steps, between = passes * (new_tokens - 1), median(seen)
            messages = passes * count + steps * min(1.0, between / GAP)
            work = np.array([passes * count, messages, passes * count * new_tokens])
            spent.append((work, before.since(address, steps * between + row * _SHORT * passes * count)))
            gaps[count] += seen
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
    return replace(told, held=held, waver=(wavering(alone),), steady=new_tokens * median(alone))


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


@dataclass(frozen=True)
class _Spent:
    """Seconds of cores so far: of the process that speaks HTTP, and of the whole machine (0: not asked for)."""

    ingress: float
    machine: float
    idle: float = 0.0  # a second of the machine, while nothing is asked for
    when: float = 0.0

    @classmethod
    def now(cls, address: str, shared: bool) -> "_Spent":
        """Read now; where the machine counts, after a rest in which its own business is measured."""
        if not shared:
            return cls(_ingress_seconds(address), 0.0)
        before = _machine_seconds()
        sleep(_REST)
        machine = _machine_seconds()
        return cls(_ingress_seconds(address), machine, (machine - before) / _REST, perf_counter())

    def since(self, address: str, engine: float) -> tuple[float, float]:
        """(of the ingress, of all others but the engine, which took so much) since then."""
        ingress = _ingress_seconds(address) - self.ingress
        if not self.when:
            return ingress, 0.0
        machine = _machine_seconds() - self.machine - self.idle * (perf_counter() - self.when)
        return ingress, max(0.0, machine - ingress - engine)


def _single(
    address: str, each: Sequence[list[dict[str, Any]]], row: float, shared: bool
) -> tuple[Any, tuple[float, float]]:
    """What texts of one token cost, one after the other: little but the requests."""
    before = _Spent.now(address, shared)
    for one in each:
        ask(address, one)
    return np.array([len(each)] * 3), before.since(address, row * _SHORT * len(each))


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


def _ingress_seconds(address: str) -> float:
    """Of a core, that the process which speaks HTTP has used. Raises UserError where it does not tell."""
    host, port = place_of(address)
    connection = HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except OSError as error:
        raise silent(address, error) from None
    finally:
        connection.close()
    told = [line.split()[1] for line in lines if line.startswith("process_cpu_seconds_total ")]
    if not told:
        raise UserError(f"{address}: /metrics has no process_cpu_seconds_total: give a server or cluster of Specpress")
    return float(told[0])


def _machine_seconds() -> float:
    """Of all cores, that were spent on something. Raises UserError on a system that does not tell."""
    try:
        told = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        raise UserError("--cores: this system does not tell what its cores do: measure on Linux") from None
    user, nice, system, _, _, interrupts, soft = map(int, told[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
