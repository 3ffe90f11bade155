"""What a quantised cache costs on the embedded pair: perplexity through it, and bytes, against full precision."""

import math

import pytest
import torch

from calib import corpora
from calib.windows import make_windows
from compress.logits import log_probabilities, token_nll
from compress.model.source import default_pair
from runtime import Model, load
from runtime.contract import CacheKind, Rows
from runtime.native.binding import CACHES

WINDOW = 1024
# The most that perplexity may grow, and the most bytes of a token's keys and values over fp16's.
BOUNDS: dict[CacheKind, tuple[float, float]] = {"int8": (0.001, 0.55), "int4": (0.01, 0.30)}


@pytest.fixture(scope="module")
def target() -> Model:
    return load(default_pair()[0])


def held_out(target: Model, count: int) -> torch.Tensor:
    """(count, WINDOW) int64 of held-out text."""
    made = make_windows(
        corpora.load(),
        target.tokenizer,
        length=WINDOW,
        calibration=1,
        evaluation_tokens=count * WINDOW,
        seed=0,
    )
    assert len(made.evaluation) == count
    return made.evaluation


def perplexity(target: Model, kind: CacheKind, windows: torch.Tensor) -> float:
    """Of all tokens of the windows but the first of each, whose keys and values all go through the cache."""
    held = target.decoder.new_cache(kind)
    losses = []
    for window in windows:
        request = held.open(WINDOW)
        logits = target.decoder.forward(window[:-1], Rows.chains([(request, 0, WINDOW - 1)]), held).logits
        losses.append(token_nll(log_probabilities(logits), window[1:]))
        held.close(request)
    return math.exp(torch.cat(losses).mean())


@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_perplexity_through_a_quantised_cache(target: Model, count: int) -> None:
    windows = held_out(target, count)
    full = perplexity(target, "float32", windows)
    growth = {kind: perplexity(target, kind, windows) / full - 1 for kind in BOUNDS}
    # Both are rounded: a cache that quietly held float32 would have no error at all.
    assert all(0 < abs(growth[kind]) <= bound for kind, (bound, _) in BOUNDS.items()), growth
    assert abs(growth["int8"]) < abs(growth["int4"])


def test_bytes_of_a_quantised_cache(target: Model) -> None:
    config = target.config
    fp16 = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for kind in CACHES:
        held = target.decoder.new_cache(kind)
        store = held.store(held.open(WINDOW))  # type: ignore[attr-defined]
        memory = sum(part.nbytes for part in (store.keys, store.values, store.key_scale, store.value_scale))
        assert memory == WINDOW * held.bytes_per_token()
        assert held.bytes_per_token() <= BOUNDS.get(kind, (0.0, 2.0))[1] * fp16
