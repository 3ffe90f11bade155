"""Hundreds of mixed requests at once, on pages that are too few for them: each answer is a Speculator's alone. Slow."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.mixed_requests import alone as right_answer
from tests.mixed_requests import catalogue, joined, told
from tests.serving import running

REQUESTS, CLIENTS = 400, 16


def _drafted(asked: list[dict[str, Any]], answers: list[list[Any]], default: str, seed: int) -> list[dict[str, Any]]:
    """Each request by one of the server's drafters; predictions hold much of the right answer."""
    generator = random.Random(seed)
    names = ("none", "grammar", "lookup", "suffix", default, default, "prediction")
    out = []
    for one, answer in zip(asked, answers, strict=True):
        name = generator.choice(names)
        more: dict[str, Any] = {"specpress": {"drafter": name}}
        if name == "prediction" or generator.random() < 0.05:
            more["prediction"] = {"type": "content", "content": answer[0][0][3:] or "nothing"}
        if generator.random() < 0.2:
            more["specpress"] |= {"draft_length": generator.randrange(1, 9)}
        out.append(one | more)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "tree"])
def test_answers_under_load_are_those_of_a_speculator_alone(
    tmp_path: Path, pair: tuple[Path, Path], alone: Any, drafter: str
) -> None:
    asked = catalogue(REQUESTS, 5)
    for i, one in enumerate(asked):
        # A plain text's chunks are put together in another way than those that tell token ids.
        one["return_token_ids"] = i % 3 != 0
        if i % 8 == 0:
            one |= {"prompt": one["prompt"] * 3, "max_tokens": 300}
    right = [right_answer(alone, one) for one in asked]
    sent = _drafted(asked, right, drafter, 6)
    options = ("--draft", str(pair[1]), "--drafter", drafter, "--pages", "20", "--context", "512", "--threads", "1")
    with running(tmp_path, [f"pair={pair[0]}"], *options) as server:

        def ask(place: int) -> list[list[Any]]:
            if place % 2:
                return joined(server.events("/v1/completions", **sent[place]), sent[place].get("n", 1))
            return told(server.post("/v1/completions", **sent[place])["choices"])

        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(ask, range(REQUESTS)))
        wrong = [place for place in range(REQUESTS) if found[place] != right[place]]
        preempted = server.metric("vllm:num_preemptions_total")
        print(f"{drafter}: {REQUESTS} requests, {len(wrong)} differ, {preempted:.0f} preemptions")
        assert not wrong, [(sent[place], found[place], right[place]) for place in wrong[:2]]
        assert preempted > 0 and server.engine()["restarts"] == 0
        assert server.wait_idle()["pages_used"] == 0
