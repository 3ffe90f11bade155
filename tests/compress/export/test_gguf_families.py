"""GGUF files of every family that llama.cpp has: read back, they compute what the model does."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UserError
from compress.export import Exported, silent
from compress.export.gguf.file import write
from runtime import formats, load
from runtime.checkpoints.gguf.checkpoint import open_gguf
from runtime.checkpoints.gguf.names import ARCHITECTURES
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.errors import UserError as RuntimeUserError
from runtime.formats.packed import PackedWeight
from tests.compress.export import gguf_families
from tests.runtime.model import families, test_composites

pytest.importorskip("gguf")

TOKENS = torch.randint(1, 8000, (37,), generator=torch.Generator().manual_seed(5))
_OLD = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma"}


def logits(path: Path) -> Tensor:
    decoder = load(path).decoder
    cache = decoder.new_cache()
    return decoder.forward(TOKENS, Rows.chains([(cache.open(len(TOKENS)), 0, len(TOKENS))]), cache).logits


def test_every_architecture_has_a_model_here() -> None:
    assert set(gguf_families.CHANGES) == set(ARCHITECTURES) - _OLD


def exported(model: Path, out: Path) -> tuple[Path, Exported]:
    out.mkdir()
    result = write(model, out, silent)
    return out / "model.gguf", result


@pytest.mark.parametrize("kind", gguf_families.CHANGES)
def test_a_file_computes_what_its_model_does(kind: str, tmp_path: Path) -> None:
    model = gguf_families.write(kind, tmp_path / kind)
    file, result = exported(model, tmp_path / "out")
    assert result.losses == ()
    found, wanted = logits(file), logits(model)
    # Norms have gone through 1 + w in some, and constants through float32.
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("kind, changes", gguf_families.VARIANTS.values(), ids=gguf_families.VARIANTS)
def test_a_file_of_another_form_computes_what_its_model_does(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = gguf_families.write(kind, tmp_path / kind, **changes)
    file, result = exported(model, tmp_path / "out")
    assert result.losses == ()
    found, wanted = logits(file), logits(model)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("kind", gguf_families.SQUARE)
def test_heads_that_llama_cpp_has_no_room_for_are_refused(kind: str, tmp_path: Path) -> None:
    """It does not load such a file: tests/test_gguf_peer.py asks it."""
    model = gguf_families.write(kind, tmp_path / kind, head_dim=48)
    with pytest.raises(UserError, match=r"expected heads that are together as wide as .* as llama\.cpp has it"):
        exported(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", gguf_families.EVEN)
def test_packed_layers_keep_their_codes(kind: str, tmp_path: Path) -> None:
    model = gguf_families.write(kind, tmp_path / kind, **gguf_families.EVEN[kind])
    packed, _ = families.pack(model, tmp_path / "form", "int8")
    file, result = exported(packed, tmp_path / "out")
    ours, theirs = open_gguf(file), open_checkpoint(packed)
    quantised = 0
    for name in theirs.names():
        prefix = name.removesuffix(".weight_scale").removesuffix(".weight_packed")
        if prefix == name or f"{prefix}.weight" not in ours.names():
            continue
        found, wanted = ours.weight(prefix), theirs.weight(prefix)
        assert isinstance(wanted, PackedWeight)
        quantised += isinstance(found, PackedWeight)
        plain = formats.dequantize(found) if isinstance(found, PackedWeight) else found
        # Scales are float16 in blocks.
        exact = formats.dequantize(wanted)
        assert plain.shape == exact.shape and float((plain - exact).norm() / exact.norm()) < 1e-2, prefix
    assert quantised > 4 and all(entry.error < 1e-2 for entry in result.losses)
    # Inputs are rounded block by block, not row by row; rows in a wrong order would give another model.
    assert float((logits(file) - logits(packed)).norm() / logits(packed).norm()) < 0.2


def test_multipliers_are_in_scales_of_the_same_codes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "mamba_d_ssm": 192, "mamba_d_head": 32}
    packed, _ = families.pack(gguf_families.write("falcon_h1", tmp_path / "f", **sizes), tmp_path / "form", "int8")
    file, result = exported(packed, tmp_path / "out")
    for name, factor in (("self_attn.q_proj", 0.8), ("self_attn.k_proj", 0.8 * 0.4), ("mamba.out_proj", 0.5)):
        found, wanted = (
            opened.weight(f"model.layers.1.{name}") for opened in (open_gguf(file), open_checkpoint(packed))
        )
        assert isinstance(found, PackedWeight) and isinstance(wanted, PackedWeight)
        assert torch.equal(found.codes, wanted.codes.view_as(found.codes))
        assert torch.allclose(found.scale, wanted.scale.float() * factor, 1e-3)
    assert all(entry.error < 1e-2 for entry in result.losses)
    # Inputs are rounded block by block, not row by row.
    assert float((logits(file) - logits(packed)).norm() / logits(packed).norm()) < 0.2


def test_experts_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    model = gguf_families.write("gpt_oss", tmp_path / "gpt_oss", hidden_size=64, intermediate_size=96)
    gguf_families.in_mxfp4(model)
    file, result = exported(model, tmp_path / "out")
    assert result.losses == () and any("6 MXFP4" in note for note in result.notes)
    assert torch.equal(logits(file), logits(model))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a soft cap": ("gemma2", {"attn_logit_softcapping": None}, "expected softcap 50.0"),
    "a scale": ("gemma3_text", {"query_pre_attn_scalar": 60}, "expected attention_scale"),
    "a head of its own": ("gemma2", {"tie_word_embeddings": False}, "tied embedding and head True"),
    "layers that rotate": (
        "smollm3",
        {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        "rotated layers 0, 1, as llama.cpp has it for smollm3, found 0:",
    ),
    "dense layers": ("qwen2_moe", {"mlp_only_layers": [0]}, "expected dense_layers ()"),
    "shares": ("qwen2_moe", {"norm_topk_prob": True}, "expected experts' renormalize False"),
    "a limit": ("gpt_oss", {"swiglu_limit": 0.4}, "expected experts' clamp (7.0, 1.702)"),
    "norms of queries": ("cohere", {"use_qk_norm": True}, "expected query_key_norm False"),
    "windows": ("exaone4", {"sliding_window": 20}, "expected rotated layers"),
    "a bias": ("seed_oss", {"attention_out_bias": True}, "o_proj.bias: expected no such bias"),
    "no bias": ("gpt_neox", {"attention_bias": False}, "query_key_value.bias: expected this bias"),
    "two bases": (
        "olmo3",
        {"rope_parameters": families.FAMILIES["olmo3"]["rope_parameters"]},
        "expected rotary frequencies that llama.cpp has for olmo2",
    ),
    "heads": ("olmoe", {"num_key_value_heads": 1}, "expected kv_heads 5"),
    "values": ("qwen3_next", {"linear_value_head_dim": 12}, "expected delta' value 20"),
    "queries": ("deepseek_v2", {"num_hidden_layers": 2}, "attention.q_lora_rank must be a positive integer"),
    "a norm": ("phimoe", {}, "llama.cpp does not compute phimoe as transformers does"),
    "chunks": ("llama4_text", {"attention_chunk_size": 20}, "expected windows (8192, 8192, 8192, None)"),
    "mixtures": ("llama4_text", {"moe_layers": [1, 2]}, "expected dense_layers (0, 2)"),
    "dense layers between": (
        "ernie4_5_moe",
        {"num_hidden_layers": 4, "moe_layer_interval": 2},
        "expected dense_layers (0, 1)",
    ),
    "steps": ("mamba2", {"time_step_limit": [0.1, 1.5]}, "expected mamba' limits (0.0, inf)"),
    "a least step": ("nemotron_h", {"time_step_min": 0.3}, "expected least step of at most 0.001"),
    "biases of a state space": ("nemotron_h", {"use_bias": True}, "in_proj.bias: expected no such bias"),
    "an order of norms": ("falcon_h1", {"mamba_norm_before_gate": True}, "expected mamba' norm gated"),
    "an expansion": ("granitemoehybrid", {"mamba_expand": 4}, "ssm.inner_size must be twice embedding_length"),
    "a dense layer among mixtures": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "expected dense_layers (0, 2)",
    ),
    "shared keys": ("gemma4_text", {"num_kv_shared_layers": 3}, "must leave a layer that slides and one that does not"),
    "groups": (
        "deepseek_v2",
        {"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
        "groups of experts by their best one",
    ),
}


@pytest.mark.parametrize("kind, changes, sentence", REFUSED.values(), ids=REFUSED)
def test_what_an_architecture_cannot_express_is_named(
    kind: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    model = gguf_families.write(kind, tmp_path / kind, **changes)
    with pytest.raises((UserError, RuntimeUserError)) as error:
        exported(model, tmp_path / "out")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_llama_cpp_computes_otherwise_is_said(tmp_path: Path) -> None:
    model = gguf_families.write("gpt_neox", tmp_path / "neox")
    assert any("GELU by its tanh form" in note for note in exported(model, tmp_path / "out")[1].notes)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    exact = gguf_families.write("gpt_oss", tmp_path / "oss", rope_parameters=yarn | {"truncate": False})
    file, result = exported(exact, tmp_path / "second")
    assert any("rounds the bounds of yarn's ramp" in note for note in result.notes)
    assert torch.equal(logits(file), logits(exact))


@pytest.mark.parametrize(
    "kind",
    [
        *("gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_5_moe_text", "falcon", "gpt2"),
        *("gemma4_text", "nemotron_h", "granitemoehybrid", "apertus"),
    ],
)
def test_damaged_headers_are_read_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    file, _ = exported(gguf_families.write(kind, tmp_path / kind), tmp_path / "out")
    whole = file.read_bytes()
    rng = random.Random(kind)
    keys, tokens = whole.index(b".context_length"), whole.index(b"tokenizer.ggml.model")
    damaged, refused = tmp_path / "damaged.gguf", 0
    for _ in range(60):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(keys, tokens)
            value = rng.choice((0, 1, 3, 1 << 16, 1 << 31, (1 << 32) - 1))
            mutant[at : at + 4] = value.to_bytes(4, "little")
        damaged.write_bytes(mutant)
        try:
            load(damaged, kernels="reference")
        except (RuntimeUserError, UserError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_of_a_checkpoint_with_towers_the_language_model_is_written(kind: str, tmp_path: Path) -> None:
    model = tmp_path / kind
    test_composites.make(kind, model)
    said = json.loads((model / "config.json").read_text())
    # llama.cpp's Gemma 3 divides by the root of a head's size.
    said["text_config"]["query_pre_attn_scalar"] = said["text_config"].get("head_dim")
    (model / "config.json").write_text(json.dumps(said))
    file, result = exported(model, tmp_path / "out")
    assert result.losses == () and not any("vision" in name for name in open_gguf(file).names())
    found, wanted = (test_composites.run(load(path).decoder, TOKENS[:20] % 90, 20) for path in (file, model))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
