"""Log-probabilities over HTTP: the same floats whatever drafts, is cached or runs beside; as lm-eval reads them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from runtime.contract import Rows
from tests.serving import Running

TEXTS = ["def f(x):\n    return x", "import os\nimport sys\n", "The quick brown fox jumps over the lazy dog.", "a"]


def _float64(alone: Any, tokens: list[int]) -> np.ndarray:
    """(T, V) log-softmax of the raw logits of each position, in float64."""
    decoder = alone.target.decoder
    cache = decoder.new_cache()
    count = len(tokens)
    handle = torch.full((count,), cache.open(count), dtype=torch.int64)
    rows = Rows(handle, torch.arange(count), torch.arange(-1, count - 1))
    logits = decoder.forward(torch.tensor(tokens), rows, cache).logits.numpy().astype(np.float64)
    shifted: np.ndarray = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _scored(server: Running, tokens: list[int], **more: Any) -> dict[str, Any]:
    asked = {"prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234} | more
    found: dict[str, Any] = server.post("/v1/completions", **asked)["choices"][0]["logprobs"]
    return found


def test_echoed_log_probabilities_are_those_of_the_logits(server: Running, alone: Any) -> None:
    for text in TEXTS:
        tokens = alone.target.tokenizer(text)["input_ids"]
        found = _scored(server, tokens)
        exact = _float64(alone, tokens)
        assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == len(tokens) + 1
        assert found["token_logprobs"][1:-1] == [exact[i, token] for i, token in enumerate(tokens[1:])]
        assert found["token_logprobs"][-1] == exact[-1].max()
        for i, top in enumerate(found["top_logprobs"][1:-1]):
            # As lm-eval asks whether a token is the greedy one.
            assert (found["token_logprobs"][i + 1] == max(top.values())) == (exact[i].argmax() == tokens[i + 1])
        assert found["text_offset"] == [0, *np.cumsum([len(token) for token in found["tokens"]])[:-1]]


def test_nothing_changes_their_bits(server: Running, alone: Any) -> None:
    """Neither drafter nor cache nor what is asked at the same time."""
    each = [alone.target.tokenizer(text * 12)["input_ids"] for text in TEXTS]
    first = [_scored(server, tokens, max_tokens=24, specpress={"drafter": "none"}) for tokens in each]
    asked = [(i, drafter) for drafter in ("lookup", "suffix", None, "none") for i in range(len(each))]

    def again(one: tuple[int, str | None]) -> dict[str, Any]:
        place, drafter = one
        return _scored(server, each[place], max_tokens=24, specpress={"drafter": drafter} if drafter else None)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(again, asked))
    assert [one == first[place] for (place, _), one in zip(asked, found, strict=True)] == [True] * len(asked)


def test_a_batch_of_prompts_without_new_tokens(server: Running, alone: Any) -> None:
    each = [alone.target.tokenizer(text)["input_ids"] for text in TEXTS]
    answer = server.post("/v1/completions", prompt=each, echo=True, logprobs=2, max_tokens=0)
    for tokens, choice in zip(each, answer["choices"], strict=True):
        exact = _float64(alone, tokens)
        assert choice["logprobs"]["token_logprobs"][1:] == [exact[i, t] for i, t in enumerate(tokens[1:])]
        assert choice["text"] == alone.target.tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_vllms_prompt_logprobs_and_token_ids(server: Running, alone: Any) -> None:
    tokens = alone.target.tokenizer(TEXTS[0])["input_ids"]
    asked: dict[str, Any] = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2}
    choice = server.post("/v1/completions", **asked, return_token_ids=True)["choices"][0]
    exact = _float64(alone, tokens)
    assert choice["prompt_token_ids"] == tokens and len(choice["token_ids"]) == 4
    assert choice["prompt_logprobs"][0] is None
    for i, entry in enumerate(choice["prompt_logprobs"][1:]):
        assert entry[str(tokens[i + 1])]["logprob"] == exact[i, tokens[i + 1]]
        assert min(one["rank"] for one in entry.values()) == 1
    streamed = [event["choices"][0] for event in server.events("/v1/completions", **asked, return_token_ids=True)]
    assert [token for one in streamed for token in one["token_ids"]] == choice["token_ids"]


def test_streamed_log_probabilities_are_the_whole_answers(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": TEXTS[1], "max_tokens": 30, "temperature": 0.8, "seed": 4, "logprobs": 3}
    whole = server.post("/v1/completions", **asked)["choices"][0]
    parts = [event["choices"][0] for event in server.events("/v1/completions", **asked)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in part["logprobs"][key]] == whole["logprobs"][key]
    assert "".join(part["text"] for part in parts) == whole["text"]


def test_bytes_of_a_chats_tokens_make_its_text(server: Running) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "é ü"}], "max_tokens": 12, "seed": 2}
    choice = server.post("/v1/chat/completions", **asked, logprobs=True, top_logprobs=1)["choices"][0]
    data = bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"])
    assert data.decode("utf-8", "replace").startswith(choice["message"]["content"].rstrip("�"))


def test_a_prediction_is_drafted_and_counted(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": TEXTS[1], "max_tokens": 40, "temperature": 0}
    text = server.post("/v1/completions", **asked)["choices"][0]["text"]
    said = {"type": "content", "content": text}
    answer = server.post("/v1/completions", **asked, prediction=said, specpress={"rounds": True})
    assert answer["choices"][0]["text"] == text
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    rounds = answer["choices"][0]["specpress"]["rounds"]
    assert {one["drafter"] for one in rounds} <= {"prediction", ""}
    assert sum(len(one["gained"]) for one in rounds) + 1 >= answer["usage"]["completion_tokens"]
    assert "completion_tokens_details" not in server.post("/v1/completions", **asked)["usage"]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_rule_of_the_requests_own(server: Running, rule: str) -> None:
    asked: dict[str, Any] = {
        "prompt": "x =",
        "max_tokens": 20,
        "seed": 3,
        "temperature": 1,
        "specpress": {"verify": rule},
    }
    first, again = (server.post("/v1/completions", **asked)["choices"][0]["text"] for _ in range(2))
    assert rule == "rejection" or first == again
