"""Mixed requests at a server for a long time: every text right, nothing lost, nothing that grows.

    .venv/bin/python -m tests.soak --seconds 1800

Sixteen clients ask for greedy and sampled texts with stop strings, log-probabilities, forms, several choices and every
drafter; nearly a third leave in the middle, a tenth read slowly. Texts are compared with those of an engine of this
process. The server's pages are so few that texts are preempted.
"""

import argparse
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mixed_requests import catalogue, joined, told
from tests.serving import Running, parsed, running

DRAFTERS = (None, "none", "lookup", "suffix", "grammar")
LEAVE, SLOW = 0.3, 0.1
GROWTH = 1.02  # of the memory after the warm-up


@dataclass
class Counts:
    """What the clients saw."""

    finished: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, wrong: str = "") -> None:
        with self.lock:
            self.finished[what] += 1
            if wrong:
                self.wrong.append(wrong)


def client(
    server: Running, requests: list[dict[str, Any]], right: list[Any], seed: int, end: float, seen: Counts
) -> None:
    """Asks until the time is over."""
    generator = random.Random(seed)
    while time.monotonic() < end:
        place = generator.randrange(len(requests))
        drafter = generator.choice(DRAFTERS)
        asked = requests[place] | ({"specpress": {"drafter": drafter}} if drafter else {})
        kind = generator.random()
        try:
            if kind < LEAVE:
                _leave(server, asked, generator)
                seen.add("left")
            elif kind < LEAVE + SLOW:
                answer = _raw(server, asked | {"stream": True}, 0.05)
                _compare(joined(parsed(answer), asked.get("n", 1)), right[place], asked, "slow", seen)
            elif generator.random() < 0.5:
                found = joined(server.events("/v1/completions", **asked), asked.get("n", 1))
                _compare(found, right[place], asked, "streamed", seen)
            else:
                found = told(server.post("/v1/completions", **asked)["choices"])
                _compare(found, right[place], asked, "whole", seen)
        except Exception as error:
            seen.add("failed", f"{type(error).__name__}: {error}")


def _compare(found: list[Any], right: list[Any], asked: dict[str, Any], what: str, seen: Counts) -> None:
    seen.add(what, "" if found == right else f"{asked} gave {found}, not {right}")


def _connection(server: Running, asked: dict[str, Any]) -> socket.socket:
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def _leave(server: Running, asked: dict[str, Any], generator: random.Random) -> None:
    with _connection(server, asked | {"stream": generator.random() < 0.7}):
        time.sleep(generator.random() * 0.2)


def _raw(server: Running, asked: dict[str, Any], pause: float) -> bytes:
    """The body of a stream, read a little at a time."""
    import http.client

    with _connection(server, asked) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200, answer.read()
        body = b""
        while part := answer.read1(2048):
            body += part
            time.sleep(pause)
        return body


def memory(pids: list[int]) -> int:
    """Bytes that processes hold."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return 4096 * sum(pages)


def descriptors(pids: list[int]) -> int:
    """Files and sockets that they have open."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def soak(server: Running, seconds: float, clients: int, requests: int, warm: float) -> dict[str, Any]:
    """Runs, and raises AssertionError for whatever was not right. Returns the figures.

    warm  seconds after which memory is looked at for the first time.
    """
    asked = catalogue(requests, 0)
    # Each alone and without speculation: what a text has to be.
    right = [told(server.post("/v1/completions", **one, specpress={"drafter": "none"})["choices"]) for one in asked]
    pids = [server.process.pid, server.engine()["pid"]]
    seen = Counts()
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=client, args=(server, asked, right, i, end, seen)) for i in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(min(warm, seconds / 2))
    assert server.engine()["restarts"] == 0, server.log.read_text()
    first = memory(pids)
    for thread in threads:
        thread.join()
    found = server.wait_idle(30)
    time.sleep(1.5)
    figures = {
        "seen": dict(seen.finished),
        "memory": [first, memory(pids)],
        "descriptors": descriptors(pids),
        "preemptions": server.metric("vllm:num_preemptions_total"),
    }
    assert not seen.wrong, (len(seen.wrong), seen.wrong[:3])
    assert found["restarts"] == 0 and found["pages_used"] == 0, found
    assert "Traceback" not in server.log.read_text()
    assert figures["descriptors"] < 60 + clients, figures
    if seconds >= 600:
        assert figures["memory"][1] < GROWTH * first, figures
    return figures


def main() -> None:
    """Of `make soak`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    target = Path(__file__).parents[1] / "examples/pair/target"
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), [f"pair={target}"], "--pages", "24", "--context", "512") as server,
    ):
        print(json.dumps(soak(server, options.seconds, options.clients, 200, 300.0)))


if __name__ == "__main__":
    main()
