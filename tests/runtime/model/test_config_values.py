"""Other values of each key of a family's configuration: logits are transformers', or a sentence says why not.

test_families.py has one configuration of each family. A key that is read wrongly, or not at all, shows in another.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from tests.runtime.model import families

LENGTH = 47
# Not of the decoder: names, sizes of tables, and what only training and sampling ask for.
_OTHERS = (
    "vocab_size",
    "dropout",
    "initializer",
    "rescale_prenorm",
    "token_id",
    "cache",
    "router_aux",
    "output_",
    "dtype",
)
_NAMES = ("architectures", "model_type", "transformers_version", "max_position_embeddings", "chunk_size_feed_forward")
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "gelu_new")
_ROPE = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3},
    {
        **{"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
)
# What transformers itself reads in two ways, by its kind of attention, and what is no causal model.
_UNSURE = {("falcon", "alibi"), ("gemma3_text", "use_bidirectional_attention")}


def others(key: str, value: Any) -> list[Any]:
    """Other values that a configuration might have there."""
    if "rope_" in key and isinstance(value, dict):
        if any(isinstance(one, dict) for one in value.values()):
            return [{kind: {"rope_theta": 1e4} | rope for kind in value} for rope in _ROPE]
        share = {k: v for k, v in value.items() if k == "partial_rotary_factor"}
        return [share | {"rope_theta": 1e4} | rope for rope in _ROPE]
    if isinstance(value, bool):
        return [not value]
    if value in _ACTIVATIONS:
        return [one for one in _ACTIVATIONS if one != value]
    if isinstance(value, int):
        return [one for one in dict.fromkeys((value + 1, value * 2, value - 1, 1)) if one > 0 and one != value]
    if isinstance(value, float):
        return [value * 1.7, value / 3] if value else [0.7]
    if value is None:
        found = {
            "window": [7, 33],
            "softcap": [0.7],
            "scal": [0.7],
            "multiplier": [0.7],
            "limit": [0.7],
            "heads": [1, 5],
        }
        return next((values for word, values in found.items() if word in key), [])
    if isinstance(value, list) and value and not isinstance(value[0], float):
        return [one for one in (value[::-1], [value[0]] * len(value), [value[-1]] * len(value)) if one != value]
    return [[1.5 * one for one in value]] if isinstance(value, list) and value else []


def changes(kind: str, share: float) -> Iterator[dict[str, Any]]:
    """A share of all other values, each alone."""
    drawn = random.Random(kind)
    for key, value in families.config(kind).to_dict().items():
        if key in _NAMES or any(word in key for word in _OTHERS) or key.startswith("_") or (kind, key) in _UNSURE:
            continue
        for other in others(key, value):
            if drawn.random() < share:
                yield {key: other}


def ours(path: Path, tokens: Tensor) -> Tensor:
    """Of a text that comes in pieces, and a token alone."""
    decoder = load(path, threads=1).decoder
    cache = decoder.new_cache()
    request, found, first = cache.open(len(tokens)), [], 0
    for piece in tokens.split([30, 9, 1, LENGTH - 40]):
        found.append(decoder.forward(piece, Rows.chains([(request, first, len(piece))]), cache).logits)
        first += len(piece)
    return torch.cat(found)


def theirs(path: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        found: Tensor = model(tokens[None]).logits[0]
    return found


def hold(kind: str, folder: Path, share: float) -> int:
    """How many of the changed configurations were run by both."""
    tokens, count = torch.randint(1, 2000, (LENGTH,), generator=torch.Generator().manual_seed(3)), 0
    for number, changed in enumerate(changes(kind, share)):
        path = folder / str(number)
        try:
            expected = theirs(families.write(kind, path, **changed), tokens)
        except Exception:  # no model of transformers', which says so in many ways
            continue
        if not torch.isfinite(expected).all():
            continue
        try:
            found = ours(path, tokens)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        error = float((found - expected).norm() / expected.norm())
        assert error < 2e-4, f"{kind}: {json.dumps(changed)}: {error:.1e}"
        count += 1
    return count


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("gpt2", {"tie_word_embeddings": False}),
        ("nemotron_h", {"tie_word_embeddings": True}),
        ("gemma3_text", {"attn_logit_softcapping": 0.7}),
        ("mamba2", {"hidden_act": "gelu"}),
    ],
)
def test_what_was_once_read_wrongly(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    tokens = torch.randint(1, 2000, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected = theirs(families.write(kind, tmp_path / "other", **changed), tokens)
    found = ours(tmp_path / "other", tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_dynamic_frequencies_are_fixed_up_to_the_last_position(tmp_path: Path) -> None:
    """As InternLM 3 has them: they only change for texts that are longer than the model's positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.3}
    path = families.write("internlm3", tmp_path / "model", rope_parameters=rope, max_position_embeddings=LENGTH)
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder) and decoder.max_positions == LENGTH
    tokens = torch.randint(1, 2000, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected = theirs(path, tokens)
    assert float((ours(path, tokens) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["granite", "qwen3_5_text", "glm4_moe", "olmo3"])
def test_some_other_values(kind: str, tmp_path: Path) -> None:
    assert hold(kind, tmp_path, 0.25) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.FAMILIES)
def test_all_other_values(kind: str, tmp_path: Path) -> None:
    assert hold(kind, tmp_path, 1.0) > 5
