"""Log-probabilities: right, and the same bits whoever drafts, however many share a round, whatever the cache knows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import Model, Speculator, load
from runtime.contract import Out
from runtime.engine import schedule
from runtime.engine.engine import Engine
from runtime.engine.logprobs import token_logprob
from runtime.engine.metrics import Metrics
from runtime.engine.requests import RequestOptions, make_request
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Request
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.tree import TreeDrafter

ASKED = RequestOptions(logprobs=3, prompt_logprobs=2)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(repetition_penalty=1.4, logit_bias={5: 2.0}),
    Sampling(temperature=0.7, top_k=20, seed=8, min_tokens=4),
]


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


def prompts(count: int, shortest: int = 5, longest: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(1, 300, rng.integers(shortest, longest)).tolist() for _ in range(count)]


def run(target: Any, drafter: Any, requests: Sequence[Request], cache: Any = None, batch: int = 8) -> list[Metrics]:
    engine = Engine(target.decoder, drafter, 4, "coupled", cache or target.decoder.new_cache(), max_batch=batch)
    metrics = [Metrics() for _ in requests]
    for one, measured in zip(requests, metrics, strict=True):
        engine.add(one, measured)
    while engine.busy:
        engine.step()
    assert all(one.error is None for one in requests)
    return metrics


def asked(target: Any, options: RequestOptions = ASKED, new: int = 24) -> list[Request]:
    return [
        make_request(target, prompt, new, SAMPLINGS[i % 4], (), options, id=i) for i, prompt in enumerate(prompts(6))
    ]


def found(requests: Sequence[Request]) -> list[Any]:
    return [(one.tokens, one.found.logprobs, one.found.prompt_logprobs) for one in requests]


def test_values_are_those_of_one_forward_over_the_whole_text(
    pair: tuple[Model, Model], whole: Callable[..., torch.Tensor]
) -> None:
    target, draft = pair
    requests = asked(target)
    run(target, ModelDrafter(draft), requests)
    for one in requests:
        rows = torch.log_softmax(whole(target.decoder, torch.tensor(one.tokens)).double(), -1).numpy()
        before = [None, *(token_logprob(row, token, 2) for row, token in zip(rows, one.tokens[1:], strict=False))]
        assert one.found.prompt_logprobs[0] is None and len(one.found.prompt_logprobs) == one.prompt_length
        assert len(one.found.logprobs) == len(one.new_tokens) == 24
        both = [*one.found.prompt_logprobs, *one.found.logprobs]
        for place, (value, expected) in enumerate(zip(both, before, strict=True)):
            if value is None or expected is None:
                assert place == 0
                continue
            assert value.token == one.tokens[place] and value.rank == expected.rank
            assert value.logprob == pytest.approx(rows[place - 1, value.token], abs=1e-9)
            count = 2 if place < one.prompt_length else 3
            best = np.argsort(-rows[place - 1], kind="stable")[:count]
            assert [token for token, _ in value.top] == best.tolist()
            assert dict(value.top).get(value.token, value.logprob) == value.logprob


@pytest.mark.parametrize("way", ["lookup", "model", "tree", "alone", "few pages"])
def test_bits_depend_on_the_request_alone(pair: tuple[Model, Model], way: str) -> None:
    target, draft = pair
    plain, other = asked(target), asked(target)
    for one in plain:  # each by itself, without drafts
        run(target, {"none": LookupDrafter()}, [one])
    drafter = {"model": ModelDrafter(draft), "tree": TreeDrafter(draft)}.get(way, LookupDrafter())
    cache = target.decoder.new_cache("float32", 5) if way == "few pages" else None
    metrics = run(target, drafter, other, cache, 1 if way == "alone" else 8)
    assert found(other) == found(plain)
    assert sum(m.accepted for m in metrics) > 0 or way in ("lookup", "alone", "few pages")
    assert (sum(m.preemptions for m in metrics) > 0) == (way == "few pages")


def test_a_known_prompt_is_read_again_only_where_its_rows_are_asked_for(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    cache, prompt = target.decoder.new_cache("float32", 40), prompts(1)[0] * 3
    assert len(prompt) > 64

    def ask(options: RequestOptions) -> tuple[Request, Metrics]:
        one = make_request(target, prompt, 5, Sampling(), (), options, id=0)
        return one, run(target, LookupDrafter(), [one], cache)[0]

    first, _ = ask(ASKED)
    again, measured = ask(ASKED)
    assert found([again]) == found([first]) and measured.reused_tokens == 0
    new_only, measured = ask(RequestOptions(logprobs=3))
    assert new_only.found.logprobs == first.found.logprobs and measured.reused_tokens >= 64
    assert new_only.found.prompt_logprobs == []
    nothing, measured = ask(RequestOptions())
    assert nothing.found.logprobs == [] and nothing.tokens == first.tokens and measured.reused_tokens >= 64


def test_logits_of_prompts_come_in_bounded_pieces(fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PROMPT_LOGIT_BYTES", 4 * 320 * 50)
    target, sizes = fake(0), list[int]()
    forward = target.decoder.forward

    def watched(*arguments: Any) -> Out:
        out: Out = forward(*arguments)
        sizes.append(len(out.logits))
        return out

    target.decoder.forward = watched
    requests = [make_request(target, prompt, 3, Sampling(), (), ASKED, id=i) for i, prompt in enumerate(prompts(5))]
    requests.append(make_request(target, prompts(6)[5], 3, Sampling(), (), id=9))
    run(target, LookupDrafter(), requests)
    assert max(sizes) <= 50 + 5 * 6  # and the rows of those whose text goes on
    monkeypatch.undo()
    for one in requests:
        alone = make_request(target, one.tokens[: one.prompt_length], 3, Sampling(), (), ASKED, id=0)
        run(target, LookupDrafter(), [alone])
        assert found([alone]) == found([one]) or one.id == 9


def test_a_prompt_may_only_be_read(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    for options in (ASKED, RequestOptions()):
        one = make_request(target, prompts(1)[0], 0, Sampling(), None, options, id=0)
        longer = make_request(target, prompts(1)[0], 1, Sampling(), None, ASKED, id=0)
        run(target, LookupDrafter(), [one])
        run(target, LookupDrafter(), [longer])
        assert one.finished and not one.new_tokens and longer.new_tokens
        assert one.found.prompt_logprobs == (longer.found.prompt_logprobs if options is ASKED else [])
    single = make_request(target, [7], 0, Sampling(), None, ASKED, id=0)
    run(target, LookupDrafter(), [single])
    assert single.found.prompt_logprobs == [None]


def test_the_token_is_among_the_most_probable_with_the_same_float() -> None:
    row = np.array([1.0, 3.0, 3.0, -np.inf], dtype=np.float32)
    value = token_logprob(row, 2, 2)
    assert [token for token, _ in value.top] == [1, 2] and value.top[1][1] == value.logprob and value.rank == 1
    assert token_logprob(row, 0, 9).rank == 3 and len(token_logprob(row, 0, 9).top) == 3
    assert token_logprob(row, 0, 0).top == () and token_logprob(row, 3, 0).logprob == -np.inf
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match="target's logits must be finite"):
            token_logprob(np.array([bad, 0.0], dtype=np.float32), 1, 0)


def test_speculator_hands_them_on(pair: tuple[Model, Model]) -> None:
    target, draft = pair
    prompt = prompts(1)[0]
    [alone] = Speculator(target).generate([prompt], 30, stop=(), logprobs=1, prompt_logprobs=0, temperature=0.8)
    speculator = Speculator(target, draft, draft_length=3, cache=CacheOptions(pages=9))
    stream = speculator.stream(prompt, 30, stop=(), logprobs=1, prompt_logprobs=0, temperature=0.8)
    pieces = list(stream)
    assert len(pieces) < 30
    assert [value for piece in pieces for value in piece.logprobs] == alone.logprobs
    assert stream.prompt_logprobs == alone.prompt_logprobs
    assert [value.token for value in alone.logprobs] == alone.tokens
    assert all(len(piece.logprobs) == len(piece.tokens) for piece in pieces)
    [silent] = speculator.generate([prompt], 30, stop=(), temperature=0.8)
    assert silent.tokens == alone.tokens and silent.logprobs == [] and silent.prompt_logprobs == []
    with pytest.raises(UserError, match="prompt_logprobs must be 0"):
        speculator.stream(prompt, 5, prompt_logprobs=-1)


def test_a_stop_string_in_the_middle_of_a_draft_leaves_one_for_each_token(tiny: Callable[..., Path]) -> None:
    target = load(tiny("llama"))
    prompt = [5, 6, 7, 8] * 6
    [whole_text] = Speculator(target).generate([prompt], 30, stop=(), logprobs=0)
    stop = whole_text.text[3:6]
    for draft in (None, LookupDrafter()):
        [cut] = Speculator(target, draft, draft_length=4 if draft else None).generate(
            [prompt], 30, stop=stop, logprobs=0
        )
        assert cut.finish == "stop" and cut.logprobs == whole_text.logprobs[: len(cut.tokens)]
