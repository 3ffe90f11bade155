"""Four times as many requests as there is room for, for a minute: some are told to come later, none is lost. Slow."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Answer, Running, running

BATCH, TOKENS = 16, 192
ALONE, OVERLOAD = 15.0, 60.0  # seconds
TIMES = 4
SHARE = 0.95  # of the tokens a second that there are without overload


def _ask(server: Running, seed: int) -> Answer:
    body: dict[str, Any] = {"prompt": f"def read_{seed}(path):\n", "max_tokens": TOKENS, "ignore_eos": True}
    return server.ask("POST", "/v1/completions", body | {"temperature": 0, "specpress": {"drafter": "none"}})


def _rate(server: Running, seconds: float, work: Callable[[float], None]) -> float:
    """Tokens a second while `work` asks until a time; from its second second on, when the batch is full."""
    ends = time.monotonic() + seconds
    worker = threading.Thread(target=work, args=(ends,))
    worker.start()
    time.sleep(1)
    began, first = time.monotonic(), server.metric("vllm:generation_tokens_total")
    time.sleep(max(0.0, ends - time.monotonic()))
    rate = (server.metric("vllm:generation_tokens_total") - first) / (time.monotonic() - began)
    worker.join()
    return rate


@pytest.mark.slow
def test_overload_costs_no_throughput_and_nobody_gets_anything_but_200_and_429(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    options = ("--threads", "1", "--max-batch", str(BATCH), "--max-queued", str(BATCH))
    with running(tmp_path, [f"pair={pair[0]}"], *options) as server:

        def as_many_as_fit(ends: float) -> None:
            def client(number: int) -> None:
                while time.monotonic() < ends:
                    number += 1000
                    assert _ask(server, number).status == 200

            with ThreadPoolExecutor(BATCH) as pool:
                list(pool.map(client, range(BATCH)))

        before = _rate(server, ALONE, as_many_as_fit)
        seen: Counter[int] = Counter()
        wrong: list[bytes] = []

        def one(seed: int) -> None:
            answer = _ask(server, seed)
            seen[answer.status] += 1
            if answer.status not in (200, 429) or (answer.status == 429 and int(answer.headers["retry-after"]) < 1):
                wrong.append(answer.body)

        def too_many(ends: float) -> None:
            pause = TOKENS / before / TIMES
            with ThreadPoolExecutor(16 * BATCH) as pool:
                due = time.monotonic()
                for seed in range(10**6, 10**7):
                    if (due := due + pause) > ends:
                        break
                    time.sleep(max(0.0, due - time.monotonic()))
                    pool.submit(one, seed)

        during = _rate(server, OVERLOAD, too_many)
        after = _rate(server, ALONE, as_many_as_fit)
        capacity = (before + after) / 2
        print(f"{before:.0f}, overloaded {during:.0f}, {after:.0f} tokens/s: {during / capacity:.3f}; answers {seen}")
        assert not wrong and set(seen) == {200, 429}, (seen, wrong[:2])
        assert seen[429] > seen[200]
        assert during > SHARE * capacity
        assert server.engine()["restarts"] == 0 and server.wait_idle(30)["pages_used"] == 0
