"""A configuration read from its file alone says the same as transformers' reading of it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoints.architecture import configuration, describe, transformers_configuration
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.model.rotary import frequencies

Tiny = Callable[..., Path]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe"])
def test_both_readings_agree(tiny: Tiny, kind: str) -> None:
    checkpoint = open_checkpoint(tiny(kind))
    ours, theirs = configuration(checkpoint), transformers_configuration(checkpoint)
    if isinstance(ours, SimpleNamespace):
        assert describe(vars(ours)) == describe(theirs.to_dict())
        assert torch.equal(frequencies(ours)[0], frequencies(theirs)[0])
    assert isinstance(ours, SimpleNamespace) == (kind == "llama")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),  # as Gemma was first released
        ({"hidden_act": None}, "gelu_tanh"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "relu"}, None),
    ],
)
def test_gemma_s_activation_has_two_keys(tiny: Tiny, said: dict[str, Any], meant: str | None) -> None:
    values = json.loads((tiny("gemma") / "config.json").read_text())
    found = describe({key: value for key, value in values.items() if not key.startswith("hidden_act")} | said)
    assert (found and found.activation) == meant


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"head_dim": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"num_hidden_layers": "2"},
        {"tie_word_embeddings": None},
    ],
)
def test_what_the_file_leaves_open_is_asked_of_transformers(
    tiny: Tiny, tmp_path: Path, change: dict[str, object]
) -> None:
    source = tiny("llama")
    values = json.loads((source / "config.json").read_text())
    target = tmp_path / "copy"
    target.mkdir()
    (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (target / "config.json").write_text(json.dumps(values | change))
    if "num_hidden_layers" in change or "tie_word_embeddings" in change:
        with pytest.raises(UserError, match=next(iter(change))):
            configuration(open_checkpoint(target))
        return
    assert not isinstance(configuration(open_checkpoint(target)), SimpleNamespace)
    (target / "config.json").write_text(json.dumps(values))
    assert isinstance(configuration(open_checkpoint(target)), SimpleNamespace)


def test_the_first_lfm2_has_other_keys(tmp_path: Path) -> None:
    """LFM2-350M's file: transformers reads it as today's, and so does who reads the file alone."""
    today = {
        **{"model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
        **{"num_key_value_heads": 2, "vocab_size": 100, "conv_L_cache": 3, "norm_eps": 1e-5, "block_multiple_of": 32},
        **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "max_position_embeddings": 512},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    first = {"full_attn_idxs": [1], "block_ff_dim": 192, "tie_embedding": False, "block_dim": 64, "conv_dim": 64}
    then = {"layer_types": ["conv", "full_attention", "conv"], "intermediate_size": 192, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(today | first))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    found = describe(transformers_configuration(open_checkpoint(tmp_path)).to_dict())
    assert found is not None and found.attending == (1,)
    assert describe(today | first) == found == describe(today | then)


def gemma4(**changed: Any) -> dict[str, Any]:
    """As it is on the hub: what only layers that see everything have, once."""
    return {
        **{"model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
        **{"attention_k_eq_v": True, "vocab_size": 100, "vocab_size_per_layer_input": 100, "intermediate_size": 96},
        **{"hidden_size_per_layer_input": 8, "sliding_window": 8, "num_kv_shared_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True},
        **changed,
    }


def test_gemma4_s_layers_have_shapes_of_their_own_and_share_keys() -> None:
    from transformers import AutoConfig

    raw = gemma4()
    found = describe(raw)
    # transformers tells them layer by layer.
    told = AutoConfig.for_model(**raw).to_dict()
    assert "per_layer_config" in told and "global_head_dim" not in told
    assert found is not None and found == describe(json.loads(json.dumps(told)))
    assert [(tuple(group.shape), group.layers) for group in found.key_groups] == [((2, 16), (0,)), ((1, 32), (1,))]
    assert found.places == ((0, 0), (1, 0), (0, 0), (1, 0)) and found.intermediates == (96, 96, 192, 192)
    assert found.cache_shape.groups == ((1, 2, 16), (1, 1, 32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, and no layer of kind 'full_attention' among"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, and no layer of kind"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types may name .* found 'chunked_attention'"),
        ({"num_global_key_value_heads": 3}, r"layer 1 has 3 key/value heads of 32 dimensions"),
        ({"global_head_dim": 31}, r"layer 1 has 1 key/value heads of 31 dimensions"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8},
            "top_k_experts is 3, and a layer has 2 experts",
        ),
    ],
)
def test_what_gemma4_cannot_be_is_told(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(gemma4(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"use_bidirectional_attention": "all"},
        {"vocab_size_per_layer_input": 90},
        {"per_layer_config": {"1": {"sliding_window": 4}}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}},
    ],
)
def test_variants_of_gemma4_are_left_to_transformers(changed: dict[str, Any]) -> None:
    assert describe(gemma4(**changed)) is None
