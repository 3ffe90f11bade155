"""Whole texts: with every drafter that of plain decoding, greedy and sampled, waiting for the device once a round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from runtime import Model, Speculator, load
from runtime.device_rounds import DeviceRounds, DraftsLater
from runtime.drafters.lookup import LookupDrafter
from runtime.drafters.model import ModelDrafter
from runtime.drafters.nested import NestedDrafter
from runtime.drafters.tree import TreeDrafter
from runtime.sampling import Sampling
from runtime.speculate import CacheOptions

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
NEW = 7


@pytest.fixture(scope="module")
def target(tiny_packed: Callable[[str], Path], device: str) -> Model:
    return load(tiny_packed("int8"), device=device, kernels="triton", planes=True)


@pytest.fixture(scope="module")
def draft(tiny: Tiny, device: str) -> Model:
    """The target's weights before they were packed: a draft that is mostly right."""
    return load(tiny("llama"), device=device, kernels="triton")


def drafters(target: Model, draft: Model) -> dict[str, Any]:
    return {
        "model": ModelDrafter(draft),
        "lookup": LookupDrafter(),
        "nested": NestedDrafter(target),
        "tree": TreeDrafter(draft),
    }


def texts(target: Model, drafter: Any, prompts: list[list[int]], sampling: Sampling) -> tuple[list[list[int]], float]:
    speculator = Speculator(target, drafter, 3 if drafter is not None else None, cache=CacheOptions(pages=8))
    results = speculator.generate(prompts, NEW, sampling, stop=())
    rounds = sum(result.metrics.rounds for result in results)
    return [result.tokens for result in results], sum(len(result.tokens) for result in results) / max(1, rounds)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=5)])
def test_every_drafter_leaves_the_text_as_it_is(target: Model, draft: Model, text: Text, sampling: Sampling) -> None:
    prompts = [text(12, seed=1).tolist(), [3, 4, 5, 6, 3, 4, 5]]
    plain, _ = texts(target, None, prompts, sampling)
    # Alone as in a batch.
    assert [texts(target, None, [prompt], sampling)[0][0] for prompt in prompts] == plain
    gained = {}
    for name, drafter in drafters(target, draft).items():
        found, gained[name] = texts(target, drafter, prompts, sampling)
        assert found == plain, name
    assert gained["model"] > 1.5


def test_a_draft_that_is_taken_later(target: Model, draft: Model, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are never asked for by themselves, and whoever cannot draft so still may."""
    drafter = ModelDrafter(draft)
    assert isinstance(target.decoder, DeviceRounds) and isinstance(drafter, DraftsLater)
    prompts = [text(5, seed=2).tolist()]
    greedy, penalised = Sampling(), Sampling(repetition_penalty=1.3)
    want = [texts(target, None, prompts, sampling)[0] for sampling in (greedy, penalised)]
    asked = []
    propose = ModelDrafter.propose
    monkeypatch.setattr(ModelDrafter, "propose", lambda *arguments: asked.append(1) or propose(*arguments))
    assert texts(target, drafter, prompts, greedy)[0] == want[0] and not asked
    assert texts(target, drafter, prompts, penalised)[0] == want[1] and asked
