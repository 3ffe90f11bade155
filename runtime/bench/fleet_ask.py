"""Requests that come to a server or a cluster when they come, and when their texts came back."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from runtime.bench.fleet import Load, percentiles
from runtime.bench.load import arrivals
from runtime.errors import UserError

_PAUSE = 0.05  # seconds
_HIGHEST_ID = 250  # token ids of random prompts: every vocabulary has them


@dataclass(frozen=True)
class Timed:
    """One stream, in seconds from when it was due: to its first and its last piece; `cached` tokens of its prompt."""

    first: float
    last: float
    tokens: int
    cached: int


def ask(address: str, bodies: Sequence[dict[str, Any]], due: Sequence[float] | None = None) -> list[Timed]:
    """Completions streamed, each on a connection of its own; `due`: seconds at which each is sent, at once otherwise.

    Raises UserError where nothing answers, or a stream ends without its usage.
    """
    host, port = place_of(address)
    try:
        return asyncio.run(_ask(host, port, bodies, due or [0.0] * len(bodies)))
    except (OSError, ValueError) as error:
        raise silent(address, error) from None


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


def random_prompts(generator: np.random.Generator, count: int, tokens: int, new_tokens: int) -> list[dict[str, Any]]:
    """So many requests of random tokens, which no cache knows."""
    return [_asked(generator.integers(3, _HIGHEST_ID, tokens).tolist(), new_tokens) for _ in range(count)]


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
        raise UserError(f"http://{host}:{port}: {_refusal(tail)}")
    told = json.loads(usage[-1][len(b"data: ") :])["usage"]
    return Timed(first, last, told["completion_tokens"], told["prompt_tokens_details"]["cached_tokens"])


def _refusal(tail: bytes) -> str:
    """What is wrong with an answer that did not tell its usage."""
    status, _, rest = tail.partition(b" ")[2].partition(b" ")
    try:
        told = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return "the server broke a stream off: has it been stopped, or does it serve another API?"
    return f"the server refused a request ({status.decode(errors='replace')}): {told}"


def after_a_pause(address: str, bodies: list[dict[str, Any]]) -> list[Timed]:
    """Texts that come to a server at rest, whose processor and caches have turned to something else."""
    sleep(_PAUSE)
    return ask(address, bodies)


def last_gap(texts: Sequence[Timed]) -> float:
    """Seconds between two tokens of the text that begins last: others are beside it, and no request of theirs."""
    one = max(texts, key=lambda text: text.first)
    return (one.last - one.first) / max(1, one.tokens - 1)


def place_of(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        return parts.hostname or "127.0.0.1", parts.port or 80
    except ValueError as error:
        raise silent(address, error) from None


def silent(address: str, error: Exception) -> UserError:
    return UserError(f"{address}: no server answers there ({error}); give http://HOST:PORT")
