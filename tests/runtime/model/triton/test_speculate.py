"""Whole texts: with every drafter that of plain decoding, greedy and sampled, waiting for the device once a round."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Model, Speculator, load
from runtime.bench.oracle import OracleDrafter
from runtime.model.on_device import DeviceRounds
from runtime.model.triton.decoder import TritonDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import DeferredDrafter, Draft, Request
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.nested import NestedDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import Growth, TreeShape
from tests.conftest import write_medusa
from tests.slices import often

Tiny = Callable[..., Path]
NEW = 4


@pytest.fixture(scope="module")
def target(small: Tiny, device: str) -> Model:
    return load(small("llama", num_hidden_layers=1), device=device, kernels="triton")


@pytest.fixture(scope="module")
def draft(small: Tiny, device: str) -> Model:
    """The target's twin: a draft that is right, so that the drafted keys are used."""
    return load(small("llama", num_hidden_layers=1), device=device, kernels="triton")


def texts(target: Model, drafter: Any, prompts: list[list[int]], sampling: Sampling) -> tuple[list[list[int]], int]:
    """The new tokens, and the rounds of all texts."""
    speculator = Speculator(target, drafter, None if drafter is None else 3, cache=CacheOptions(pages=8))
    results = speculator.generate(prompts, NEW, sampling, stop=())
    return [result.tokens for result in results], sum(result.metrics.rounds for result in results)


PLANS = [TreeShape((2, 1, 1)), Growth(depth=2, width=2, branch=2)]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=5)]


@pytest.mark.parametrize("sampling", often(SAMPLINGS, SAMPLINGS[1]), ids=["greedy", "coupled"])
def test_every_drafter_leaves_the_text_as_it_is(target: Model, draft: Model, sampling: Sampling) -> None:
    prompts = [[7, 300, 12, 9], [3, 4, 3]]
    plain, rounds = texts(target, None, prompts, sampling)
    found, fewer = texts(target, ModelDrafter(draft), prompts, sampling)
    assert found == plain and fewer < rounds
    assert texts(target, LookupDrafter(), prompts[1:], sampling)[0] == plain[1:]
    assert texts(target, TreeDrafter(draft), prompts[:1], sampling)[0] == plain[:1]


@pytest.mark.parametrize("plan", often(PLANS, PLANS[1]), ids=["static", "dynamic"])
def test_trees_are_read_once_a_level(draft: Model, plan: TreeShape | Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees that reading all logits gives, which penalties still need."""
    read: list[int] = []
    found = TritonDecoder.candidates

    def counted(self: TritonDecoder, logits: Tensor, *rest: Any) -> Any:
        read.append(len(logits))
        return found(self, logits, *rest)

    def trees(samplings: Sequence[Sampling]) -> list[Draft]:
        requests = [Request(i, [7, 300, 12 + i], 3, sampling, 20) for i, sampling in enumerate(samplings)]
        return TreeDrafter(draft, plan).propose(requests, [4, 4])

    monkeypatch.setattr(TritonDecoder, "candidates", counted)
    here = trees(SAMPLINGS)
    assert len(read) == 2 and read[0] == 2
    penalised = [Sampling(repetition_penalty=1.2), SAMPLINGS[1]]
    assert all(made.tokens for made in trees(penalised)) and len(read) == 2
    monkeypatch.setattr("runtime.speculative.drafters.tree.sampled_on_device", lambda sampling, rule: False)
    by_host = trees(SAMPLINGS)
    assert len(read) == 2
    assert [(made.tokens, made.parents) for made in here] == [(made.tokens, made.parents) for made in by_host]


@pytest.mark.parametrize("right", often([1.0, 0.0], 1.0))
def test_an_oracle_on_the_device(target: Model, draft: Model, right: float) -> None:
    """The draft's chains run on the device, and what is verified there are the oracle's tokens."""
    prompts = [[7, 300, 12, 9], [3, 4, 3]]
    plain, rounds = texts(target, None, prompts, Sampling())
    known = {tuple(prompt): text for prompt, text in zip(prompts, plain, strict=True)}
    oracle = OracleDrafter(draft, known, right)
    assert isinstance(target.decoder, DeviceRounds) and isinstance(oracle, DeferredDrafter)
    found, counted = texts(target, oracle, prompts, Sampling())
    # The draft is the target's twin: by itself it would be right in either case.
    assert found == plain and (counted < rounds if right else counted == rounds)


def test_nested(tiny_packed: Callable[[str], Path], device: str) -> None:
    target = load(tiny_packed("int8"), device=device, kernels="triton", planes=True)
    plain, _ = texts(target, None, [[7, 300]], Sampling())
    assert texts(target, NestedDrafter(target), [[7, 300]], Sampling())[0] == plain


@pytest.mark.parametrize("shared", often([True, False], True))
def test_medusa(target: Model, tmp_path: Path, shared: bool) -> None:
    """Trees on the target's kernels: the reference's heads, drafts that are taken, the text of plain decoding."""
    folder = write_medusa(target.path, tmp_path / "medusa", scale=0.02, shared=shared)
    heads = load_heads(folder, target)
    hidden = torch.randn(2, target.decoder.hidden_size, generator=torch.Generator().manual_seed(1))
    meant = load_heads(folder, load(target.path, kernels="reference")).logits(hidden)
    assert torch.allclose(heads.logits(hidden.to(target.decoder.device)).cpu(), meant, rtol=1e-3, atol=1e-3)
    for sampling in SAMPLINGS:
        prompts = [[7, 300, 12, 9], [3, 4, 3]]
        plain, rounds = texts(target, None, prompts, sampling)
        found, fewer = texts(target, MedusaDrafter(heads), prompts, sampling)
        assert found == plain and fewer <= rounds
    made = load(target.path, kernels="reference")
    reference, _ = texts(made, MedusaDrafter(load_heads(folder, made)), [[7, 300, 12, 9]], SAMPLINGS[0])
    assert reference == texts(target, MedusaDrafter(heads), [[7, 300, 12, 9]], SAMPLINGS[0])[0]


def test_drafts_that_are_taken_later(target: Model, draft: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never asked for by themselves; where a rule needs the host, they are."""
    drafter, prompts = ModelDrafter(draft), [[5, 6]]
    assert isinstance(target.decoder, DeviceRounds) and isinstance(drafter, DeferredDrafter)
    greedy, penalised = Sampling(), Sampling(repetition_penalty=1.3)
    want = [texts(target, None, prompts, sampling)[0] for sampling in (greedy, penalised)]
    asked = []
    propose = ModelDrafter.propose
    monkeypatch.setattr(ModelDrafter, "propose", lambda *arguments: asked.append(1) or propose(*arguments))
    assert texts(target, drafter, prompts, greedy)[0] == want[0] and not asked
    assert texts(target, drafter, prompts, penalised)[0] == want[1] and asked
