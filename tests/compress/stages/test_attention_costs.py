"""What errors of scores and values do to a layer's output: as derivatives say it, with caps, sinks and windows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.stages.attention_costs import output_costs, score_costs
from compress.stages.attention_inputs import attention_inputs
from runtime import load
from runtime.kernels.reference import first_seen
from runtime.model.layers import Attention
from runtime.model.reference import LlamaDecoder
from tests.runtime.model.families import write

LENGTH = 9


def reference(path: Path) -> tuple[LlamaDecoder, Attention]:
    """A decoder and its second layer's attention."""
    decoder = load(path, kernels="reference").decoder
    assert isinstance(decoder, LlamaDecoder)
    attention = decoder.parts.blocks[1].attention
    assert isinstance(attention, Attention)
    return decoder, attention


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_an_error_of_a_value_costs_is_what_it_adds(tiny: Callable[..., Path]) -> None:
    decoder, weights = reference(tiny("llama"))
    a = decoder.architecture
    cost, error = output_costs(decoder, 1), random(a.head_dim, seed=1)
    for head in range(a.heads):
        mixed = torch.zeros(1, a.heads, a.head_dim)
        mixed[0, head] = error
        added = float(decoder.output(mixed, weights, torch.zeros(1, a.hidden)).square().sum())
        assert float(error @ cost[head] @ error) == pytest.approx(added, rel=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("window", [None, 4])
def test_what_an_error_of_a_score_costs_is_what_the_derivative_says(
    tmp_path: Path, kind: str, window: int | None
) -> None:
    decoder, weights = reference(write(kind, tmp_path / kind))
    a = decoder.architecture
    assert bool(a.softcap) == (kind == "gemma2") and (weights.sinks is not None) == (kind == "gpt_oss")
    kv_heads, dim = a.shape(1)
    q, k, v = (random(LENGTH, n, dim, seed=n) for n in (a.heads, kv_heads, kv_heads))
    costs = output_costs(decoder, 1)
    at = torch.arange(LENGTH)
    seen = at[:, None] >= at if window is None else (first_seen(at, window, False)[:, None] <= at) & (at <= at[:, None])
    found = score_costs(q, k, v, costs, decoder, weights, None if window is None else seen)
    for row in (0, 5, LENGTH - 1):
        for head in range(a.heads):
            own = head * kv_heads // a.heads

            def mixed(scores: Tensor, head: int = head, row: int = row, own: int = own) -> Tensor:
                if a.softcap:
                    scores = torch.tanh(scores / a.softcap) * a.softcap
                scores = scores.masked_fill(~seen[row], float("-inf"))
                if weights.sinks is not None:
                    scores = torch.cat((scores, weights.sinks[head : head + 1]))
                return scores.softmax(0)[:LENGTH] @ v[:, own]

            slopes = torch.autograd.functional.jacobian(mixed, k[:, own] @ q[row, head] * a.scaling)
            want = float(((costs[head] @ slopes) * slopes).sum())
            assert float(found[row, head]) == pytest.approx(want, rel=1e-3, abs=1e-6 * float(found.max()))
    assert bool((found[1:] > 0).all())


def test_queries_that_move_nothing_hardly_count(tiny: Callable[..., Path]) -> None:
    """Texts of one token: each reads itself, whatever its score. Unweighed, queries count all the same."""
    decoder, _ = reference(tiny("qwen3"))
    tokens = torch.randint(1, 257, (3, 2), generator=torch.Generator().manual_seed(0))
    for costs in (True, False):
        one, two = (list(attention_inputs(decoder, tokens[:, :count], costs=costs)) for count in (1, 2))
        for (_, alone), (_, both) in zip(one, two, strict=True):
            share = float(alone.moments.norm() / both.moments.norm())
            assert (share < 1e-4) == costs and (share > 0.1) != costs
            assert (alone.mixing is not None) == costs
