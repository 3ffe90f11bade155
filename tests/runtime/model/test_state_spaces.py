"""Families with state spaces: what their configurations may say otherwise than the table's, and what they may not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import load
from runtime.checkpoints.architecture import describe
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.model.load import own_architecture
from runtime.native.binding import PATHS, usable
from runtime.speculate import CacheOptions
from tests.runtime.model.families import config, write
from tests.runtime.model.test_families import FLOATS, relative, run, text, together, transformers_logits, tree_after

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, no biases, one group": (
        "mamba2",
        {"tie_word_embeddings": True, "use_bias": False, "use_conv_bias": False, "n_groups": 1, "conv_kernel": 2},
    ),
    "heads of more than a vector": (
        "mamba2",
        {
            "hidden_size": 70,
            "num_heads": 2,
            "head_dim": 70,
            "n_groups": 2,
            "time_step_limit": [0.0, 1e9],
            "state_size": 33,
        },
    ),
    "dense blocks alone": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    # transformers' cache has no length without attention.
    "no attention": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "moe"], "norm_topk_prob": False, "use_cache": False},
    ),
    "no mixture, rotated": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "no state spaces": ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
    "outputs normed behind their gates": ("falcon_h1", {"mamba_norm_before_gate": False, "tie_word_embeddings": True}),
    "no norm of outputs": (
        "falcon_h1",
        {
            "mamba_rms_norm": False,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_n_heads": 10,
            "mamba_n_groups": 5,
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant(name: str, tmp_path: Path) -> None:
    """transformers' logits; the reference's bits, at every width, in trees and in batches."""
    kind, more = VARIANTS[name]
    path, tokens = write(kind, tmp_path / kind, **more), text(33)
    decoder, reference = (load(path, threads=1, kernels=kernels).decoder for kernels in ("auto", "reference"))
    assert isinstance(decoder, BaseDecoder)
    whole = run(decoder, tokens, len(tokens))
    assert relative(whole, transformers_logits(path, tokens)) < 1e-4
    assert torch.equal(run(reference, tokens, len(tokens)), whole)
    for width in (1, 2, 7):
        assert torch.equal(run(decoder, tokens, width), whole), width
    tree_after(decoder, tokens, FLOATS)
    together(decoder, [tokens, text(7)], CacheOptions("int4", 4))


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_every_instruction_path(kind: str, tmp_path: Path) -> None:
    """Heads wider than four vectors, and no multiple of one: the reference's bits. Plain torch is near to them."""
    sizes = {"hidden_size": 170, "num_heads": 2, "head_dim": 170, "n_groups": 2, "state_size": 37}
    if kind == "falcon_h1":
        sizes = {"mamba_d_ssm": 166, "mamba_d_head": 83, "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_state": 21}
    path, tokens = write(kind, tmp_path / kind, **sizes), text(19)
    want = run(load(path, threads=1, kernels="reference").decoder, tokens, 19)
    for name in (name for name in PATHS if usable(name)[0]):
        found = load(path, threads=2, kernels=name).decoder
        assert torch.equal(run(found, tokens, 19), want) and torch.equal(run(found, tokens, 2), want), name
    assert relative(run(load(path, threads=1, kernels="plain-torch").decoder, tokens, 19), want) < 1e-5


def test_a_model_without_attention_has_no_keys(tmp_path: Path) -> None:
    decoder = load(write("mamba2", tmp_path / "mamba2"), threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    for kind in ("float32", "int8", "int4"):
        for pages in (None, 3):
            cache = decoder.new_cache(kind, pages)  # type: ignore[arg-type]
            handle = cache.open(100)
            store = cache.store(handle)
            assert cache.bytes_per_token() == 0 and all(part.numel() == 0 for part in (store.keys, store.values))
    assert decoder.max_positions >= 1 << 20


@pytest.mark.parametrize("width", [3, 8])
def test_steps_are_bounded_at_every_width(width: int, tmp_path: Path) -> None:
    """Limits that all steps exceed: transformers bounds those of a whole text, and here those of any rows are."""
    path, tokens = write("mamba2", tmp_path / "mamba2", time_step_limit=[0.01, 0.02]), text(24)
    decoder = load(path, threads=1).decoder
    plain = load(write("mamba2", tmp_path / "plain", time_step_limit=[0.0, 1e9]), threads=1).decoder
    found = run(decoder, tokens, 1)
    assert torch.equal(found, run(decoder, tokens, width))
    assert relative(found, transformers_logits(path, tokens)) < 1e-4 < relative(found, run(plain, tokens, 24))


def test_older_files_name_their_layers_otherwise(tmp_path: Path) -> None:
    """A pattern of letters, and layers called mamba and attention: transformers reads them as today's, and so do we."""
    today = own_architecture(config("nemotron_h"))
    assert today is not None
    raw = config("nemotron_h").to_dict() | {"hybrid_override_pattern": "ME*-M"}
    del raw["layers_block_type"]
    old = ["mamba", "moe", "attention", "mlp", "mamba"]
    assert describe(raw) == describe(raw | {"layers_block_type": old}) == today
    hybrid = config("granitemoehybrid").to_dict()
    known = describe(hybrid)
    assert known is not None
    assert describe(hybrid | {"layer_types": ["mamba", "attention", "mamba"]}) == known


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    """JSON has no infinity: config.json holds a mapping, which who reads the file alone has to know."""
    path = write("granitemoehybrid", tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    assert raw["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert describe(raw) == own_architecture(config("granitemoehybrid"))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("mamba2", {"n_groups": 4}, "num_heads must be a multiple of n_groups, found 10 and 4"),
        ("mamba2", {"conv_kernel": 1}, "conv_kernel 2 or more, found 1"),
        ("mamba2", {"state_size": 0}, "state_size must be a positive integer, found 0"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit must be the lower and the upper, found 0.5 and"),
        ("mamba2", {"time_step_limit": [0.5, "x"]}, "time_step_limit must hold numbers, found x"),
        ("mamba2", {"time_step_limit": [0.5]}, r"time_step_limit must be 2 numbers, found \[0.5\]"),
        ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, r"layers_block_type must be .* found \['conv'\]"),
        ("nemotron_h", {"layers_block_type": "ME*-"}, "layers_block_type must be a list .* found ME"),
        ("nemotron_h", {"n_group": 5}, "n_group 5 and topk_group 2 do not fit 12 experts"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 3}, r"layer_types must be .* found \['conv'\]"),
        ("granitemoehybrid", {"mamba_d_head": 7}, "must be 120 channels together, found 8 of 7"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "must be 120 channels together, found 7 of 15"),
        ("granitemoehybrid", {"residual_multiplier": None}, "residual_multiplier must hold numbers, found None"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers must be 5 numbers, found \[1.0, 2.0\]"),
        ("falcon_h1", {"key_multiplier": None}, "key_multiplier must hold numbers, found None"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(kind: str, change: dict[str, Any], said: str) -> None:
    raw = config(kind).to_dict()
    with pytest.raises(UserError, match=f"^config.json: .*{said}"):
        describe(raw | change)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mamba2", {"hidden_act": "gelu"}),
        ("nemotron_h", {"moe_latent_size": 16}),
        ("nemotron_h", {"mlp_hidden_act": "softsign"}),
        ("falcon_h1", {"hidden_act": "relu"}),
    ],
)
def test_what_the_record_has_no_words_for_is_left_to_transformers(kind: str, change: dict[str, Any]) -> None:
    assert describe(config(kind).to_dict() | change) is None


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = write("mamba2", tmp_path / "mamba2")
    tensors = load_file(path / "model.safetensors")
    name = "backbone.layers.1.mixer.D"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"tensor {name} has shape \(9,\), config.json implies \(10,\)"):
        load(path, threads=1)
