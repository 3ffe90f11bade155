"""A server in a process of its own, a cluster, a client that costs little, and the same texts from the engine alone."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import TracebackType
from typing import Any

from runtime.bench.options import HttpOptions
from runtime.bench.random_models import is_random
from runtime.bench.random_tokenizer import write_tokenizer
from runtime.bench.speculate import Item, Job, Way, run_once
from runtime.errors import UserError
from runtime.model.load import Model


class Served:
    """`python -m runtime.serve` on the job's target, with the same drafter and threads."""

    def __init__(self, options: HttpOptions, model: Model, clients: int) -> None:
        if is_random(model.config) and not (model.path / "tokenizer.json").exists():
            write_tokenizer(model.path, model.decoder.vocab_size)
        self._command = self._words(options, model, clients)
        self.port = 0

    def _words(self, options: HttpOptions, model: Model, clients: int) -> list[str]:
        told = {
            "--target": f"bench={model.path}",
            "--port": 0,
            "--max-batch": clients,
            "--drafter": options.drafter,
            "--draft": options.draft,
            "--corpus": options.corpus,
            "--draft-length": options.draft_length,
            "--threads": options.threads,
            "--device": options.device,
            "--kernels": options.kernels,
        }
        words = [str(part) for pair in told.items() if pair[1] is not None for part in pair]
        return [sys.executable, "-m", "runtime.serve", *words]

    def __enter__(self) -> "Served":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready: "):
            self._process.wait()
            raise UserError("the server did not start; what it said stands above")
        self.port = int(line.rsplit(":", 1)[1])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Clustered(Served):
    """`specpress cluster up` with the same, one replica on a Ray cluster of this machine alone."""

    def _words(self, options: HttpOptions, model: Model, clients: int) -> list[str]:
        with socket.socket() as end:  # a port that nobody listens on now
            end.bind(("127.0.0.1", 0))
            port = end.getsockname()[1]
        told = {
            "target": str(model.path.absolute()),
            "address": "local",
            "port": port,
            "max_batch": clients,
            "replicas": {"cpus": 0},
            "drafter": options.drafter,
            "draft": options.draft,
            "draft_length": options.draft_length,
            "threads": options.threads,
            "device": options.device,
            "kernels": options.kernels,
        }
        self._folder = TemporaryDirectory(prefix="specpress-cluster-")
        file = Path(self._folder.name) / "cluster.yaml"
        file.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))  # YAML, too
        return [sys.executable, "-m", "specpress", "cluster", "up", str(file)]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._folder.cleanup()


def in_process(job: Job, way: Way, clients: int) -> tuple[float, float]:
    """(tokens a second, median seconds to the first token) of `clients` texts at once, from the engine alone."""
    done = run_once(replace(job, batch=clients), way, _items(job, clients))
    firsts = [metrics.arrivals[0][0] for metrics in done.metrics]
    return sum(map(len, done.tokens)) / done.seconds, median(firsts)


def over_http(port: int, job: Job, clients: int) -> tuple[float, float]:
    """The same over HTTP, each text a stream on a connection of its own."""
    return streams(port, [_asked(job, item, i) for i, item in enumerate(_items(job, clients))])


def streams(port: int, asked: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(tokens a second, median seconds to the first token) of completions streamed at once, with their usage.

    Raises UserError where a server breaks one off.
    """
    return asyncio.run(_streams(port, [_request(one) for one in asked]))


async def _streams(port: int, bodies: Sequence[bytes]) -> tuple[float, float]:
    open_ = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
    started = perf_counter()
    found = await asyncio.gather(*(_stream(*ends, body) for ends, body in zip(open_, bodies, strict=True)))
    spent = perf_counter() - started
    return sum(tokens for tokens, _ in found) / spent, median(first for _, first in found)


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, float]:
    """(new tokens, seconds to the first of them)."""
    started, first, last = perf_counter(), 0.0, b""
    writer.write(body)
    while part := await reader.read(65536):
        if not first and b"data: " in part:
            first = perf_counter() - started
        last = (last + part)[-2000:]
    writer.close()
    usage = [line for line in last.split(b"\n") if b'"usage":{' in line]
    if not usage:
        raise UserError(f"the server broke a stream off: {last[-300:].decode(errors='replace')}")
    return int(json.loads(usage[-1][len(b"data: ") :])["usage"]["completion_tokens"]), first


def _asked(job: Job, item: Item, place: int) -> dict[str, Any]:
    return {
        "prompt": item.tokens,
        "max_tokens": job.new_tokens,
        "temperature": job.sampling.temperature,
        "seed": job.sampling.seed,
        "ignore_eos": True,
        # Passes read the same prompts again and again: no pass may find them read.
        "cache_salt": f"{perf_counter()} {place}",
        "specpress": {"verify": job.rule},
    }


def _request(asked: dict[str, Any]) -> bytes:
    data = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _items(job: Job, clients: int) -> list[Item]:
    return list(islice(cycle(job.items), clients))
