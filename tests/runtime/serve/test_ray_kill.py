"""Replicas and nodes that are lost in the middle of texts: a pause, and the same bytes; never on another path."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from runtime.serve.ray_config import ClusterConfig, Replicas
from tests.mixed_requests import alone as right_answer
from tests.mixed_requests import catalogue, joined
from tests.ray_cluster import Nodes, nodes, wait_for
from tests.serving import Running, parsed

ENGINE = "ray::ServeReplica:specpress:engine"
WAIT = 120.0


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    with nodes(2) as found:
        yield found


def _told(two: Nodes, pair: tuple[Path, Path], **other: Any) -> ClusterConfig:
    replicas = Replicas(least=2, most=2, cpus=0, resources={"engine": 1}, leave=2)
    fixed = {"target": str(pair[0]), "name": "pair", "port": two.port, "threads": 1, "replicas": replicas}
    return ClusterConfig(**fixed | {"drafter": "lookup", "pages": 600, "max_batch": 32} | other)


def _requests(count: int, tokens: int) -> list[dict[str, Any]]:
    return [one | {"max_tokens": tokens, "ignore_eos": True, "n": 1} for one in catalogue(count, 11)]


_SAMPLED = {"max_tokens": 600, "temperature": 0.8, "ignore_eos": True}
# Texts that are still being written when a replica is killed, however busy the machine is.
LONG: list[dict[str, Any]] = [{"prompt": f"def read_{i}(path):\n", "seed": i} | _SAMPLED for i in range(12)]


@pytest.fixture(scope="module")
def right_long(alone: Any) -> list[Any]:
    """What LONG gives, each text alone."""
    return [right_answer(alone, one) for one in LONG]


def _read(server: Running, one: dict[str, Any]) -> Any:
    """All of a stream; or the error that it ended with."""
    answer = server.ask("POST", "/v1/completions", one | {"stream": True})
    if answer.status != 200:
        return answer.status
    events = [block.removeprefix("data: ") for block in answer.body.decode().split("\n\n") if block.startswith("data")]
    if events[-1] != "[DONE]":
        return json.loads(events[-1])["error"]["code"]
    return joined(parsed(answer.body), 1)


def _tokens(server: Running) -> float:
    return server.metric("vllm:generation_tokens_total")


def _wait_tokens(server: Running, count: float) -> None:
    end = time.monotonic() + WAIT
    while _tokens(server) < count and time.monotonic() < end:
        time.sleep(0.1)


def _wait_replicas(count: int) -> None:
    from ray import serve

    end = time.monotonic() + WAIT
    while True:
        states = serve.status().applications["specpress"].deployments["engine"].replica_states
        if dict(states) == {"RUNNING": count}:
            return
        assert time.monotonic() < end, states
        time.sleep(0.1)


def _disturbed(two: Nodes, server: Running, requests: list[dict[str, Any]], turn: int) -> list[Any]:
    """What is read of the requests, all at once, while a replica is killed, and then the node of the other one, which
    has most of the streams by then. A new node comes at once."""
    before, wanted = _tokens(server), sum(one["max_tokens"] for one in requests)

    victim = wait_for(ENGINE, 2)[turn % 2]
    other = 1 - two.place_of(victim)
    with ThreadPoolExecutor(len(requests)) as pool:
        reading = [pool.submit(_read, server, one) for one in requests]
        _wait_tokens(server, before + wanted / 64)
        os.kill(victim, signal.SIGKILL)
        _wait_tokens(server, before + wanted / 2)
        two.kill(other)
        two.add()
        found = [one.result() for one in reading]
    _wait_replicas(2)
    return found


def _difference(one: Any, other: Any) -> tuple[Any, ...]:
    """Where two texts differ first, and how they go on there."""
    if not isinstance(one, list):
        return (one,)
    texts = one[0][0], other[0][0]
    at = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return at, *map(len, texts), *(text[max(0, at - 40) : at + 40] for text in texts), one[0][2], other[0][2]


def _turns(two: Nodes, server: Running, requests: list[dict[str, Any]], expected: list[Any], turns: int) -> None:
    for turn in range(turns):
        found = _disturbed(two, server, requests, turn)
        wrong = [place for place in range(len(requests)) if found[place] != expected[place]]
        assert not wrong, (turn, requests[wrong[0]], *_difference(found[wrong[0]], expected[wrong[0]]))
    resumed, lost = (server.metric(f"specpress:{name}_total") for name in ("resumed_requests", "engine_restarts"))
    assert resumed >= turns and lost >= turns
    print(f"{turns} replicas and {turns} nodes killed, {turns * len(requests)} streams, {resumed:.0f} resumptions")


def test_a_killed_replica_and_a_killed_node_cost_their_streams_a_pause(
    two: Nodes, pair: tuple[Path, Path], alone: Any, right_long: list[Any], tmp_path: Path
) -> None:
    short = _requests(12, 500)
    expected = [*(right_answer(alone, one) for one in short), *right_long[:8]]
    _turns(two, two.server(_told(two, pair), tmp_path / "log"), [*short, *LONG[:8]], expected, 1)


@pytest.mark.slow
def test_ten_times_a_replica_and_a_node_during_fifty_streams(
    two: Nodes, pair: tuple[Path, Path], alone: Any, tmp_path: Path
) -> None:
    requests = _requests(50, 300)
    expected = [right_answer(alone, one) for one in requests]
    _turns(two, two.server(_told(two, pair), tmp_path / "log"), requests, expected, 10)


@pytest.mark.slow
def test_without_resuming_the_streams_of_a_killed_replica_end_with_errors(
    two: Nodes, pair: tuple[Path, Path], right_long: list[Any], tmp_path: Path
) -> None:
    found = _disturbed(two, two.server(_told(two, pair, resume=False), tmp_path / "log"), LONG, 0)
    assert "engine_down" in found
    assert all(one in ("engine_down", right) for one, right in zip(found, right_long, strict=True))


@pytest.mark.slow
def test_replicas_of_other_kernels_never_go_on_with_a_text(
    two: Nodes, pair: tuple[Path, Path], right_long: list[Any], tmp_path: Path
) -> None:
    """One of each: a text whose replica is lost waits for patience, and ends; the others are not touched."""
    from ray import serve

    from runtime.serve.ray_app import application
    from runtime.serve.ray_command import APPLICATION
    from tests.ray_unequal import Unequal

    told = _told(two, pair, patience=1.0)
    server = two.server(told, tmp_path / "log")
    two.add(other=1)
    two.kill(0)
    serve.run(application(told, Unequal), name=APPLICATION, route_prefix=None)
    _wait_replicas(2)
    server.wait_ready()
    short = [{"prompt": f"def f{i}(", "max_tokens": 4, "temperature": 0} for i in range(8)]
    prints, end = set[str](), time.monotonic() + WAIT
    while len(prints) < 2:  # the ingress hears of a replica a little after Ray says that it runs
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda a: server.post("/v1/completions", **a), short))
        prints |= {one["system_fingerprint"] for one in found}
        assert time.monotonic() < end, prints
    before, victims = _tokens(server), wait_for(ENGINE, 2)
    with ThreadPoolExecutor(len(LONG)) as pool:
        reading = [pool.submit(_read, server, one) for one in LONG]
        _wait_tokens(server, before + 200)
        os.kill(victims[0], signal.SIGKILL)
        found = [one.result() for one in reading]
    assert "engine_down" in found and any(one == right for one, right in zip(found, right_long, strict=True))
    assert all(one in ("engine_down", right) for one, right in zip(found, right_long, strict=True))
