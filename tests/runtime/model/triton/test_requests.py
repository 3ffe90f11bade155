"""What requests ask for beside their text, where tokens are chosen on the device and drafts are taken later."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime import Model, Speculator, load
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics
from runtime.engine.requests import RequestOptions, make_request
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.sampling.structure import Structure
from runtime.speculate import CacheOptions
from runtime.speculative.draft import DeferredDrafts, Draft, Request
from runtime.speculative.drafters.model import ModelDrafter
from tests.slices import often

Tiny = Callable[..., Path]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=5)]
PROMPTS = [[7, 300, 12, 9], [3, 4, 3]]


@pytest.fixture(scope="module")
def target(small: Tiny, device: str) -> Model:
    return load(small("llama", num_hidden_layers=1), device=device, kernels="triton")


@pytest.fixture(scope="module")
def draft(small: Tiny, device: str) -> Model:
    return load(small("llama", num_hidden_layers=1), device=device, kernels="triton")


def test_logprobs_of_tokens_that_the_device_chose(target: Model, draft: Model) -> None:
    options: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 0, "stop": ()}
    plain = Speculator(target, cache=CacheOptions(pages=8)).generate(PROMPTS, 3, SAMPLINGS, **options)
    fast = Speculator(target, draft, 3, cache=CacheOptions(pages=8)).generate(PROMPTS, 3, SAMPLINGS, **options)
    assert [(r.tokens, r.logprobs, r.prompt_logprobs) for r in fast] == [
        (r.tokens, r.logprobs, r.prompt_logprobs) for r in plain
    ]
    assert sum(r.metrics.accepted for r in fast) > 0
    greedy = plain[0]
    assert all(value.rank == 1 and value.top == ((value.token, value.logprob),) for value in greedy.logprobs)
    assert [value is None for value in greedy.prompt_logprobs] == [True, False, False, False]


def test_structured_texts_are_judged_on_the_host(target: Model, draft: Model) -> None:
    pytest.importorskip("llguidance")
    structure = Structure.regex("a(cd|gh)")
    for sampling in SAMPLINGS[1:]:
        plain = Speculator(target).generate(PROMPTS[:1], 5, sampling, structure=structure)[0]
        fast = Speculator(target, draft, 2).generate(PROMPTS[:1], 5, sampling, structure=structure)[0]
        assert fast.tokens == plain.tokens and plain.finish == "stop"
        assert fast.metrics.rounds < plain.metrics.rounds and fast.metrics.forced_accepted > 0


class Faulty(ModelDrafter):
    """Fails where drafts begin, or where they are taken, in its second round."""

    rounds = 0
    moment = "settle"

    def propose_deferred(self, *arguments: Any) -> DeferredDrafts | None:
        self.rounds += 1
        if self.moment == "propose" and self.rounds == 2:
            raise UserError("boom")
        return super().propose_deferred(*arguments)

    def settle(self, requests: Sequence[Request], deferred: DeferredDrafts, tokens: Any) -> list[Draft]:
        if self.moment == "settle" and self.rounds == 2:
            raise UserError("boom")
        return super().settle(requests, deferred, tokens)


@pytest.mark.parametrize("moment", often(["propose", "settle"], "settle"))
def test_drafts_that_fail_on_their_way(target: Model, draft: Model, moment: str) -> None:
    [plain] = Speculator(target).generate(PROMPTS[:1], 5, stop=())
    drafter = Faulty(draft)
    drafter.moment = moment
    engine = Engine(target.decoder, drafter, 1, "coupled", target.decoder.new_cache(pages=8), lenient=True)
    one = make_request(target, PROMPTS[0], 5, Sampling(), (), RequestOptions(rounds=True), id=0)
    measured = Metrics()
    engine.add(one, measured)
    while engine.busy:
        engine.step()
    assert one.new_tokens == plain.tokens and str(one.drafter_fault) == "boom"
    assert measured.drafter_faults == {"UserError: boom": 1} and not drafter._texts
    assert all(token >= 0 for event in one.found.rounds for token in event.tokens)
