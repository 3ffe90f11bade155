"""What a quantised cache of keys and values damages, and takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress import Recipe, compress
from compress.best import caches
from compress.best.space import CACHES
from compress.progress import silent
from runtime import load
from runtime.contract import Rows
from tests.runtime.model.families import write

Tiny = Callable[..., Path]


def logits(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of all positions, float64, through the cache that the artifact names."""
    decoder = load(model).decoder
    cache = decoder.new_cache(decoder.kv.kind)
    request = cache.open(len(tokens))
    found = decoder.forward(tokens, Rows.chains([(request, 0, len(tokens))]), cache).logits
    return torch.log_softmax(found.double(), dim=1)


def test_damage_is_the_divergence_of_the_run_with_such_a_cache(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    windows = torch.randint(1, 320, (3, 96), generator=torch.Generator().manual_seed(0))
    found = caches.measure(load(model), windows, None, silent)
    assert found[0] == 0.0 < found[1] < found[2]
    # The same text calibrates the run: its cache has the same factors.
    text = tmp_path / "text.txt"
    text.write_text("a few words of text, and some more of them. " * 200)
    options = {"calib": str(text), "samples": 2, "seq_len": 32, "eval_tokens": 0, "speed": False}
    artifact = compress(model, Recipe.load("kv-int8"), tmp_path / "kv", **options)
    plain, rounded = (torch.stack([logits(path, w) for w in windows]) for path in (model, artifact.model))
    divergence = float((plain.exp() * (plain - rounded)).sum(-1)[:, :-1].mean())
    assert found[1] == pytest.approx(divergence, rel=0.5)


def test_bytes_are_those_of_the_cache(tiny: Tiny) -> None:
    model = load(tiny("llama"))
    one, ten = caches.bytes_of(model, 1), caches.bytes_of(model, 10)
    assert ten == tuple(10 * size for size in one) and len(one) == len(CACHES)
    assert one[0] > one[1] > one[2] > 0
    assert one[0] == model.decoder.new_cache("float32").bytes_per_token()


def test_layers_with_a_state_have_a_float_cache_and_their_states_count(tmp_path: Path) -> None:
    model = load(write("lfm2", tmp_path / "lfm2"), threads=1)
    assert caches.measure(model, torch.ones((1, 8), dtype=torch.long), None, silent) == (0.0,)
    per_token = model.decoder.new_cache("float32").bytes_per_token()
    # Those of a token and of a draft of sixteen, in each of two layers three inputs of 200 channels.
    assert caches.bytes_of(model, 10, requests=2)[0] == 10 * per_token + 2 * 4 * 17 * (2 * 3 * 200)
