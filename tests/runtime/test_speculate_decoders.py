"""The loop on real decoders and caches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import load
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Speculator, lossless_class
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.lookup import LookupDrafter


@pytest.fixture
def pair(tiny: Callable[..., Path]) -> Iterator[tuple[Any, Any]]:

    yield load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


class TreeBeside(LookupDrafter):
    """The lookup's chain, with a wrong sibling before every token: the right path is never contiguous."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for draft in super().propose(requests, [budget // 2 for budget in budgets]):
            tokens = [token for right in draft.tokens for token in ((right + 1) % 320, right)]
            parents = [parent for i in range(len(draft.tokens)) for parent in (2 * i - 1, 2 * i - 1)]
            drafts.append(Draft(tokens, parents))
        return drafts


def test_the_real_decoder(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    prompts = ["def f(x):\n    return", "import os\nimport os\nimport"]
    cases: list[dict[str, Any]] = [{}, {"temperature": 0.3, "seed": 2}, {"repetition_penalty": 1.2}]
    for options in cases:
        expected = [Speculator(target).generate([p], 30, stop=(), **options)[0].tokens for p in prompts]
        for drafter in (draft, target, LookupDrafter(), TreeBeside()):
            results = Speculator(target, drafter, draft_length=6).generate(prompts, 30, stop=(), **options)
            assert [result.tokens for result in results] == expected
            if drafter is target:
                assert total([result.metrics for result in results]).acceptance_rate == 1


def test_the_adapter(tiny: Callable[..., Path]) -> None:
    """Any other architecture: the same loop, without the promise."""

    target = load(tiny("gpt2"))
    assert lossless_class(target, "coupled", Sampling()) == "measured"
    for drafter in (target, LookupDrafter()):
        results = Speculator(target, drafter, 4).generate(["def f(x):", "import os"], 20, stop=())
        assert [len(result.tokens) for result in results] == [20, 20]
        metrics = total([result.metrics for result in results])
        assert metrics.drafted > 0
        if drafter is target:
            assert metrics.acceptance_rate is not None and metrics.acceptance_rate > 0.9


def test_streams_in_a_paged_cache(pair: tuple[Any, Any]) -> None:
    """Too large ones are refused at once; one that is closed or finds no page gives back its own, and no other ends."""
    target, draft = pair
    prompts = [[i + 1, *range(5, 54)] for i in range(3)]
    expected = [Speculator(target).generate([prompt], 100, stop=())[0].tokens for prompt in prompts]
    speculator = Speculator(target, draft, draft_length=4, cache=CacheOptions(pages=4))
    cache = speculator._cache
    with pytest.raises(UserError, match="too small for one request: 193 tokens need 4 pages of 64, and it has 3"):
        Speculator(target, cache=CacheOptions(pages=3)).stream([1] * 50, 143)
    speculator.stream(prompts[0], 100, stop=()).close()  # never begun
    first, closed, second = (speculator.stream(prompt, 100, stop=()) for prompt in prompts)
    texts = [list(next(first).tokens), list(next(closed).tokens)]
    assert cache.pages_free == 2
    closed.close()
    assert cache.pages_free == 3 and list(closed) == []
    # Both can begin; whoever is the first to need a page that the other holds is out.
    with pytest.raises(UserError, match="ran out of pages with one request left in it") as error:
        for _ in range(100):
            texts[0] += next(first).tokens
            next(second)
            next(second)
    assert "\n" not in str(error.value) and first.finish is None
    texts[0] += [token for piece in first for token in piece.tokens]
    assert texts[0] == expected[0] and cache.pages_free == 4
    assert speculator.generate([prompts[2]], 100, stop=())[0].tokens == expected[2] and cache.pages_free == 4


def constant_model(path: Path, probabilities: np.ndarray) -> Path:
    """A Llama whose next-token distribution is known: nothing is added to embeddings of ones, the head holds log p."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, tie_word_embeddings=False)
    model.config.tie_word_embeddings = False
    hidden = model.config.hidden_size
    logits = torch.full((model.config.vocab_size,), -200.0)
    logits[: len(probabilities)] = torch.tensor(probabilities).log()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight = torch.nn.Parameter((logits / hidden)[:, None].repeat(1, hidden))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    out = path.parent / f"constant-{probabilities[0]}"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_real_decoder_s_distribution(
    tiny: Callable[..., Path], rule: Any, chi_squared: Callable[[np.ndarray, np.ndarray], float]
) -> None:

    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    path = tiny("llama", num_hidden_layers=1)
    target, draft = load(constant_model(path, p)), load(constant_model(path, p[::-1].copy()))
    counts = np.zeros((5, 5))
    speculator = Speculator(target, draft, draft_length=3, verify=rule)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(60)]
    for result in speculator.generate([[7]] * 60, 16, samplings, stop=()):
        for a, b in zip(result.tokens[::2], result.tokens[1::2], strict=True):
            counts[a, b] += 1
    assert chi_squared(counts, np.outer(p, p)) > 1e-3
    assert chi_squared(counts, np.outer(p[::-1], p[::-1])) < 1e-9
