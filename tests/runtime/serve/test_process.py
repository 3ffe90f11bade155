"""What becomes of texts when the engine's process dies or hangs in the middle of them: a pause, and the same bytes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.sampling.params import Sampling
from tests.mixed_requests import alone as right_answer
from tests.mixed_requests import catalogue, joined
from tests.serving import Running, running

PROMPT = "def read_{}(path):\n"


def _requests(count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy and sampled ones, with stop strings, penalties, log-probabilities and drafters mixed in."""
    drafters = ["lookup", "none", "suffix", None]
    out = []
    for i in range(count):
        one: dict[str, Any] = {
            "prompt": PROMPT.format(i),
            "max_tokens": tokens,
            "temperature": 0.9 * (i % 2),
            "seed": i,
        }
        one["specpress"] = {"drafter": drafters[i % 4]} if drafters[i % 4] else None
        if i % 3 == 0:
            one["frequency_penalty"] = 0.5
        if i % 5 == 0:
            one["stop"] = ["return", "raise"]
        out.append(one)
    return out


def _expected(alone: Any, one: dict[str, Any]) -> str:
    sampling = Sampling(
        temperature=one["temperature"], seed=one["seed"], frequency_penalty=one.get("frequency_penalty", 0.0)
    )
    text: str = alone.generate([one["prompt"]], one["max_tokens"], sampling, one.get("stop"))[0].text
    return text


def _text(server: Running, one: dict[str, Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in server.events("/v1/completions", **one))


def _hit_while(
    server: Running,
    requests: list[dict[str, Any]],
    number: int,
    hold: float,
    read: Callable[[Running, dict[str, Any]], Any] = _text,
) -> list[Any]:
    """What is read of the requests, all at once; the engine gets the signal when half of them have begun."""
    before = server.metric("vllm:time_to_first_token_seconds_count")

    def hit() -> None:
        end = time.monotonic() + 30
        while server.metric("vllm:time_to_first_token_seconds_count") < before + len(requests) / 2:
            if time.monotonic() > end:
                return
        pid = server.engine()["pid"]
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(hold)
            if server.engine()["pid"] == pid:
                os.kill(pid, signal.SIGCONT)

    hitter = threading.Thread(target=hit)
    hitter.start()
    with ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(lambda one: read(server, one), requests))
    hitter.join()
    return texts


def test_a_killed_engine_costs_its_streams_a_pause(server: Running, alone: Any) -> None:
    requests = _requests(8, 160)
    restarts = server.engine()["restarts"]
    resumed = server.metric("specpress:resumed_requests_total")
    texts = _hit_while(server, requests, signal.SIGKILL, 0)
    assert texts == [_expected(alone, one) for one in requests]
    assert server.engine()["restarts"] == restarts + 1
    assert server.metric("specpress:resumed_requests_total") > resumed
    server.wait_ready()


def test_a_stopped_engine_is_noticed(server: Running, alone: Any) -> None:
    requests = _requests(6, 160)
    restarts = server.engine()["restarts"]
    texts = _hit_while(server, requests, signal.SIGSTOP, 10)
    assert texts == [_expected(alone, one) for one in requests]
    assert server.engine()["restarts"] == restarts + 1


def test_what_brings_the_engine_down_three_times_ends_and_the_rest_goes_on(server: Running, alone: Any) -> None:
    long = {"prompt": "import", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "n": 8}
    other = {"prompt": "class Late:\n", "max_tokens": 30, "temperature": 0}
    answers: dict[str, Any] = {}
    first = threading.Thread(target=lambda: answers.update(long=server.ask("POST", "/v1/completions", long)))
    first.start()
    late: threading.Thread | None = None
    for death in range(3):
        deaths = server.engine()["restarts"]
        while server.engine()["running"] == 0 and first.is_alive():
            time.sleep(0.005)
        os.kill(server.engine()["pid"], signal.SIGKILL)
        while server.engine()["restarts"] == deaths:
            time.sleep(0.005)
        if death == 1:
            # Waits until the one that may be the cause has ended.
            late = threading.Thread(target=lambda: answers.update(other=server.post("/v1/completions", **other)))
            late.start()
        if death < 2:
            server.wait_ready()
    first.join()
    assert late is not None
    late.join()
    assert answers["long"].status == 500 and "died 3 times" in answers["long"].json()["error"]["message"]
    assert answers["long"].headers["x-should-retry"] == "false"
    assert answers["other"]["choices"][0]["text"] == _expected(alone, other | {"seed": 0})
    server.wait_ready()


def test_the_engine_ends_with_the_server(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with running(tmp_path, [f"pair={pair[0]}"], "--threads", "1") as server:
        pid = server.engine()["pid"]
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


def test_sigterm_lets_running_streams_end_and_takes_nothing_new(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with running(tmp_path, [f"pair={pair[0]}"], "--threads", "1") as server:
        answers: list[Any] = []
        asked = {"prompt": "import", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "n": 4}
        stream = threading.Thread(target=lambda: answers.append(server.events("/v1/completions", **asked)))
        stream.start()
        while server.metric("vllm:generation_tokens_total") == 0:
            time.sleep(0.002)
        server.process.send_signal(signal.SIGTERM)
        refused = [server.ask("GET", "/ready"), server.ask("POST", "/v1/completions", {"prompt": "a"})]
        assert [(one.status, one.json()["error"]["code"]) for one in refused] == [(503, "draining")] * 2
        assert refused[0].headers["retry-after"]
        stream.join()
        ends = [choice["finish_reason"] for event in answers[0] for choice in event["choices"]]
        assert ends.count("length") == 4
        assert server.process.wait(10) == 0


@pytest.mark.slow
def test_twenty_times_a_signal_in_the_middle_of_thirty_two_streams(server: Running, alone: Any) -> None:
    """Of every kind: with forms, log-probabilities, several choices. All of each stream is what it would have been."""
    requests = [one | {"max_tokens": 120, "return_token_ids": i % 2 == 0} for i, one in enumerate(catalogue(32, 7))]
    expected = [right_answer(alone, one) for one in requests]

    def read(server: Running, one: dict[str, Any]) -> list[list[Any]]:
        return joined(server.events("/v1/completions", **one), one.get("n", 1))

    restarts = server.engine()["restarts"]
    for turn in range(20):
        number = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)[turn % 3]
        found = _hit_while(server, requests, number, 10, read)
        wrong = [place for place in range(32) if found[place] != expected[place]]
        assert not wrong, (turn, number, requests[wrong[0]], found[wrong[0]], expected[wrong[0]])
        server.wait_ready()
    print(f"20 signals, {server.engine()['restarts'] - restarts} restarts, 640 streams, none differs")
