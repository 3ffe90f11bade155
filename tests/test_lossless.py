"""The promise on the embedded pair: speculation changes no token, for original and compressed targets.

50 held-out prompts in one batch, 128 new tokens each: batching is exact too, which makes this affordable. Through the
kernels that `auto` takes here, which each test's id and report name.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calib import corpora
from calib.prompts import prompts
from compress.model.source import default_pair
from runtime import Model, Speculator, load
from runtime.contract import Out
from runtime.engine.metrics import total
from runtime.kernels.dispatch import choose
from runtime.sampling.params import Sampling
from runtime.speculate import Result, lossless_class
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.nested import NestedDrafter

# A few lengths for the original and one 4-bit target, the rest with the slow tests. test_lossless_matrix.py has every
# drafter, target, cache and batch, at one length.
TARGETS = ("original", "nf4", "int8-dynamic", "int4-rtn", "ternary")
NEW_TOKENS = 128
KERNELS = choose("auto", "cpu").name


def named(target: object) -> str:
    """Of a test: the target and the kernels that it runs on, or a length."""
    return f"{target} on {KERNELS}" if isinstance(target, str) else str(target)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prompts(corpora.load(), 50, seed=0)


@pytest.fixture(scope="module")
def draft() -> Model:
    return load(default_pair()[1])


@pytest.fixture(scope="module", params=TARGETS, ids=named)
def target(request: pytest.FixtureRequest, pair_target: Callable[[str], Path]) -> Model:
    made = load(pair_target(request.param))
    assert made.decoder.kernels == KERNELS
    return made


@pytest.fixture(scope="module")
def plain(target: Model, texts: list[str]) -> list[Result]:
    results = Speculator(target).generate(texts, max_new_tokens=NEW_TOKENS)
    assert total([r.metrics for r in results]).mean_width == 1
    return results


def check(target: Model, drafter: object, gamma: int, texts: list[str], plain: list[Result]) -> float:
    """Asserts that no token differs; returns the mean width of the target's forwards."""
    assert lossless_class(target, "coupled", Sampling()) == "exact"
    results = Speculator(target, drafter, draft_length=gamma).generate(texts, max_new_tokens=NEW_TOKENS)  # type: ignore[arg-type]
    mismatches = sum(a.tokens != b.tokens for a, b in zip(results, plain, strict=True))
    assert mismatches == 0, f"{mismatches} of {len(texts)} texts differ, on {KERNELS}"
    measured = total([r.metrics for r in results])
    assert measured.accepted > 0 and measured.mean_width is not None
    return measured.mean_width


@pytest.mark.parametrize(
    ("target", "gamma"), [("original", 4), ("nf4", 1), ("nf4", 12)], indirect=["target"], ids=named
)
def test_greedy_with_the_model_drafter(
    target: Model, draft: Model, gamma: int, texts: list[str], plain: list[Result]
) -> None:
    # The last token of a text needs no draft, so the mean stays a little under γ + 1.
    assert check(target, draft, gamma, texts, plain) > 1 + 0.9 * gamma


@pytest.mark.parametrize(
    ("target", "gamma"), [("original", 1), ("original", 12), ("nf4", 4)], indirect=["target"], ids=named
)
def test_greedy_with_prompt_lookup(target: Model, gamma: int, texts: list[str], plain: list[Result]) -> None:
    assert check(target, LookupDrafter(), gamma, texts, plain) > 1


@pytest.mark.parametrize("target", ["int8-dynamic"], indirect=True, ids=named)
def test_greedy_and_coupled_with_the_nested_drafter(target: Model, texts: list[str], plain: list[Result]) -> None:
    """The target's planes are those of the same weights, so `plain` without them is what must come out."""
    planes = load(target.path, planes=True)
    assert check(planes, NestedDrafter(planes), 4, texts, plain) > 4.2
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=5)
    expected = Speculator(target).generate(texts[:10], max_new_tokens=40, sampling=sampling)
    drafted = Speculator(planes, NestedDrafter(planes), 4).generate(texts[:10], max_new_tokens=40, sampling=sampling)
    assert [r.tokens for r in drafted] == [r.tokens for r in expected]
    for results in (drafted, Speculator(planes, NestedDrafter(planes), 4).generate(texts[:10], max_new_tokens=40)):
        # Its own upper four bits guess most of a model's tokens.
        assert (total([r.metrics for r in results]).acceptance_rate or 0) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("gamma", range(1, 13))
def test_greedy_at_every_length(target: Model, draft: Model, gamma: int, texts: list[str], plain: list[Result]) -> None:
    check(target, draft, gamma, texts, plain)
    check(target, LookupDrafter(), gamma, texts, plain)


@pytest.mark.parametrize("target", ["nf4"], indirect=True, ids=named)
def test_a_wrong_rule_would_be_noticed(target: Model, draft: Model, texts: list[str], plain: list[Result]) -> None:
    """The positive of the tests above: noise on the logits of verification alone shows as a mismatch."""

    class Tilted:
        def __init__(self, model: Model):
            self.__dict__.update(vars(model.decoder))
            self._decoder = model.decoder
            self.new_cache = model.decoder.new_cache

        def forward(self, tokens, rows, cache, logits_at=None):  # type: ignore[no-untyped-def]
            out = self._decoder.forward(tokens, rows, cache, logits_at)
            if len(rows) > len(rows.request.unique()):
                noise = torch.randn(out.logits.shape, generator=torch.Generator().manual_seed(1)) * 0.5
                return Out(out.logits + noise, out.hidden)
            return out

    tilted = Model(Tilted(target), target.path, target.config)  # type: ignore[arg-type]
    results = Speculator(tilted, draft, draft_length=4).generate(texts[:10], max_new_tokens=32)
    assert any(a.tokens != b.tokens[:32] for a, b in zip(results, plain, strict=False))
