"""What one replica does, measured over HTTP; and requests that come when they come, to hold a simulation against."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from runtime.bench.fleet import Cost, Figures, Fleet, Load, gap, percentiles
from runtime.bench.load import arrivals
from runtime.errors import UserError
from runtime.serve.worker import GAP

_SHORT, _LONG = 16, 512  # tokens of the prompts whose first tokens tell what a row costs
_SINGLES = 40  # texts of one token, which tell what a request costs
_BETWEEN = 4  # such texts while another one is written
_REST, _PAUSE = 1.0, 0.1  # seconds
_MOST_CROWDED, _NEAR = 8.0, 0.01  # what is believed of replicas that crowd each other, and how exactly it is found
_HIGHEST_ID = 250  # token ids of random prompts: every vocabulary has them

_Prompts = Callable[[int, int, int], list[dict[str, Any]]]  # so many requests, of so many tokens, for so many new ones


@dataclass(frozen=True)
class Timed:
    """One stream, in seconds from when it was due: to its first and its last piece; `cached` tokens of its prompt."""

    first: float
    last: float
    tokens: int
    cached: int


def measure(address: str, batches: Sequence[int], new_tokens: int, shared: bool = False, passes: int = 5) -> Figures:
    """One replica's figures, medians of so many passes; nothing else may be asked of the server meanwhile.

    address  of a server, or of a cluster's ingress with one replica; batches: texts at once, rising.
    shared   the server runs on this machine, with engines of one thread each: what is spent beside them is measured,
             too, by what the machine's cores do. They must not all be busy, and nothing else may run.

    Raises UserError where nothing answers there, a request is refused, or this system does not tell what cores do.
    """
    generator = np.random.default_rng()  # prompts that no earlier measurement left in the cache

    def prompts(count: int, tokens: int, new: int) -> list[dict[str, Any]]:
        return [_asked(generator.integers(3, _HIGHEST_ID, tokens).tolist(), new) for _ in range(count)]

    ask(address, prompts(1, _SHORT, new_tokens))  # warms up
    firsts = {
        tokens: median(_after_a_pause(address, prompts(1, tokens, new_tokens))[0].first for _ in range(2 * passes))
        for tokens in (_SHORT, _LONG)
    }
    row = max(0.0, (firsts[_LONG] - firsts[_SHORT]) / (_LONG - _SHORT))
    spent, rounds = [_single(address, [prompts(1, _SHORT, 1) for _ in range(_SINGLES)], row, shared)], []
    often = 3 * passes
    for count in batches:
        before = _Spent.now(address, shared)
        runs = [_after_a_pause(address, prompts(count, _SHORT, new_tokens)) for _ in range(often)]
        between = median(map(_last_gap, runs))
        rounds.append((count, between))
        steps = often * (new_tokens - 1)
        messages = often * count + steps * min(1.0, between / GAP)
        work = np.array([often * count, messages, often * count * new_tokens])
        spent.append((work, before.since(address, steps * between + row * _SHORT * often * count)))
    ingress, others = _costs(spent)
    ways = [ingress, others] if shared else [ingress]
    first = max(0.0, firsts[_SHORT] - row * _SHORT - sum(one.news(1) for one in ways))
    requests = sum(one.request for one in ways)
    # What costs more than the wait for a first token is not all spent within it.
    early = min(1.0, first / requests) if requests else 1.0
    told = Figures(first - early * requests, row, tuple(rounds), ingress, others, early)
    return replace(told, held=_held(address, prompts, told, min(_LONG, 4 * new_tokens), often))


def _after_a_pause(address: str, bodies: list[dict[str, Any]]) -> list[Timed]:
    """Texts that come to a server at rest, whose processor and caches have turned to something else."""
    sleep(_PAUSE)
    return ask(address, bodies)


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


def crowding(
    address: str, one: Figures, replicas: int, cores: float, new_tokens: int, passes: int = 15
) -> tuple[float, ...]:
    """Figures.crowd of an idle cluster of so many replicas on one machine of so many cores: medians of the passes.

    one  what one replica does: what ingress, client and Ray take of the cores while texts are written is no crowding.

    Raises UserError where nothing answers there, or a request is refused.
    """
    generator = np.random.default_rng()
    gaps: list[list[float]] = [[] for _ in range(replicas)]
    for _ in range(passes):
        for count in range(1, replicas + 1):  # the router gives each text to a replica of its own
            bodies = [_asked(generator.integers(3, _HIGHEST_ID, _SHORT).tolist(), new_tokens) for _ in range(count)]
            gaps[count - 1].append(_last_gap(_after_a_pause(address, bodies)))
    return crowd_behind(one, Fleet(replicas, cores=cores), [median(found) for found in gaps], new_tokens)


def crowd_behind(one: Figures, fleet: Fleet, gaps: Sequence[float], new_tokens: int) -> tuple[float, ...]:
    """Figures.crowd with which texts of 1, 2, … replicas at once take so many times longer than one, as in `gaps`:
    seconds between two of their tokens, simulated by bisection."""

    def longer(crowd: tuple[float, ...]) -> float:
        told = replace(one, crowd=crowd)
        return gap(told, fleet, len(crowd), _SHORT, new_tokens) / gap(told, fleet, 1, _SHORT, new_tokens)

    crowd: tuple[float, ...] = (1.0,)
    for found in gaps[1:]:
        low, high = 1.0, _MOST_CROWDED
        while high - low > _NEAR:
            middle = (low + high) / 2
            low, high = (middle, high) if longer((*crowd, middle)) < found / gaps[0] else (low, middle)
        crowd = (*crowd, low)
    return crowd


def _last_gap(texts: Sequence[Timed]) -> float:
    """Seconds between two tokens of the text that begins last: others are beside it, and no request of theirs."""
    one = max(texts, key=lambda text: text.first)
    return (one.last - one.first) / max(1, one.tokens - 1)


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
    host, port = _place(address)
    connection = HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except OSError as error:
        raise _silent(address, error) from None
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


def _place(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        return parts.hostname or "127.0.0.1", parts.port or 80
    except ValueError as error:
        raise _silent(address, error) from None


def _silent(address: str, error: Exception) -> UserError:
    return UserError(f"{address}: no server answers there ({error}); give http://HOST:PORT")


def ask(address: str, bodies: Sequence[dict[str, Any]], due: Sequence[float] | None = None) -> list[Timed]:
    """Completions streamed, each on a connection of its own; `due`: seconds at which each is sent, at once otherwise.

    Raises UserError where nothing answers, or a stream ends without its usage.
    """
    host, port = _place(address)
    try:
        return asyncio.run(_ask(host, port, bodies, due or [0.0] * len(bodies)))
    except (OSError, ValueError) as error:
        raise _silent(address, error) from None


def checked(address: str, load: Load) -> dict[str, float]:
    """Milliseconds of whole texts, by percentile, where the load comes to a server as in the simulation.

    Raises UserError where nothing answers, or a request is refused.
    """
    bodies = shared_prompts(load)
    return percentiles([one.last for one in ask(address, bodies, arrivals(load.rate, load.requests, load.seed))])


def shared_prompts(load: Load) -> list[dict[str, Any]]:
    """The load's requests: the same prefix for each as in the simulation, random tokens otherwise."""
    generator = np.random.default_rng(load.seed)
    chosen = np.random.default_rng(load.seed + 1).integers(0, load.prefixes, load.requests)
    begins = generator.integers(3, _HIGHEST_ID, (load.prefixes, load.shared)).tolist()
    ends = generator.integers(3, _HIGHEST_ID, (load.requests, load.prompt - load.shared)).tolist()
    return [_asked(begins[which] + end, load.new_tokens) for which, end in zip(chosen, ends, strict=True)]


def _asked(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}, "stream": True}
    return {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True} | usage


async def _ask(host: str, port: int, bodies: Sequence[dict[str, Any]], due: Sequence[float]) -> list[Timed]:
    began = perf_counter()
    return list(
        await asyncio.gather(*(_one(host, port, body, began + when) for body, when in zip(bodies, due, strict=True)))
    )


async def _one(host: str, port: int, body: dict[str, Any], due: float) -> Timed:
    await asyncio.sleep(max(0.0, due - perf_counter()))
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + data)
    first, last, tail = 0.0, 0.0, b""
    while part := await reader.read(65536):
        if b'"text":' in part:
            last = perf_counter() - due
            first = first or last
        tail = (tail + part)[-2000:]
    writer.close()
    usage = [line for line in tail.split(b"\n") if b'"usage":{' in line]
    if not usage:
        raise UserError(f"the server broke a stream off: {tail[-300:].decode(errors='replace')}")
    told = json.loads(usage[-1][len(b"data: ") :])["usage"]
    return Timed(first, last, told["completion_tokens"], told["prompt_tokens_details"]["cached_tokens"])
