"""Depth pruning: which blocks go, and that the shorter model is the long one with those blocks skipped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.errors import UserError
from compress.prune import depth
from runtime.checkpoints.architecture import describe

TEXT = torch.randint(0, 320, (2, 64), generator=torch.Generator().manual_seed(0))


def test_influence_is_one_minus_the_mean_cosine_over_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(3, 50, 16, generator=generator)
    after = before + 0.5 * torch.randn(3, 50, 16, generator=generator)
    tokens = [(x.double(), y.double()) for x, y in zip(before.view(-1, 16), after.view(-1, 16), strict=True)]
    cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in tokens]
    expected = 1 - sum(cosines) / len(cosines)
    assert depth.influence([(before, after)]) == pytest.approx(expected, rel=1e-4)
    # Unequal batches count by their tokens.
    parts = [(before[:1], after[:1]), (before[1:], after[1:])]
    assert depth.influence(parts) == pytest.approx(expected, rel=1e-4)
    assert depth.influence([(before, before * 3)]) == pytest.approx(0, abs=1e-6)
    assert depth.influence([(before, -before)]) == pytest.approx(2)
    assert depth.influence([(before.bfloat16(), after.bfloat16())]) == pytest.approx(expected, rel=0.02)


def test_zero_states_nan_and_no_tokens() -> None:
    x = torch.ones(4, 8)
    assert depth.influence([(torch.zeros(4, 8), torch.zeros(4, 8))]) == 0
    assert depth.influence([(torch.zeros(4, 8), x)]) == 1
    assert depth.influence([(x * 1e-30, x)]) == pytest.approx(0, abs=1e-5)
    for bad in (math.nan, math.inf):
        broken = x.clone()
        broken[2, 1] = bad
        with pytest.raises(ValueError, match="NaN or Inf"):
            depth.influence([(x, x), (x, broken)])
    with pytest.raises(ValueError, match="no tokens"):
        depth.influence([])
    with pytest.raises(ValueError, match="one shape"):
        depth.influence([(x, x[:2])])


def test_the_least_influential_go_until_the_share_is_reached() -> None:
    influences = [0.9, 0.2, 0.05, 0.3, 0.05, 0.1, 0.4, 0.8]
    assert depth.choose(influences, [10] * 8, 0, 0.25) == (2, 4)
    assert depth.choose(influences, [10] * 8, 0, 0.1) == (4,)  # of equal ones the later
    assert depth.choose(influences, [10] * 8, 0, 0.26) == (2, 4, 5)
    assert depth.choose(influences, [10, 10, 1, 10, 1, 1, 10, 10], 0, 0.15) == (1, 2, 4, 5)  # by weights, not number
    # Qwen2 0.5B's shape: a quarter of the blocks would be less than a fifth of the file.
    assert len(depth.choose([0.1] * 24, [14_912_384] * 24, 136_134_656, 0.25)) == 7
    assert len(depth.choose([0.1] * 22, [44_044_288] * 22, 131_074_048, 0.25)) == 6
    with pytest.raises(UserError, match="leaves a block"):
        depth.choose([0.1], [10], 0, 0.25)
    with pytest.raises(ValueError, match="argument"):
        depth.choose([0.1], [10, 10], 0, 0.25)
    with pytest.raises(ValueError, match="share above 0"):
        depth.choose([0.1, 0.2], [10, 10], 0, 0.9)


def test_names_move_up() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    names += [f"model.layers.{i}.mlp.experts.{i}.w1.weight" for i in range(12)]
    found = depth.renumber(names, "model.layers", (1, 3, 10))
    assert found["lm_head.weight"] == "lm_head.weight"
    assert {old: new for old, new in found.items() if "layers" in old} == {
        f"model.layers.{old}.mlp.experts.{old}.w1.weight": f"model.layers.{new}.mlp.experts.{old}.w1.weight"
        for new, old in enumerate([0, 2, 4, 5, 6, 7, 8, 9, 11])
    }
    assert depth.renumber(["h.0.ln_1.weight", "h.1.ln_1.weight"], "transformer.h", (0,)) == {
        "h.1.ln_1.weight": "h.0.ln_1.weight"
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("phi3", {}),
        ("gemma", {}),
        ("mixtral", {}),
        ("gpt2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ],
)
def test_the_shorter_model_is_the_long_one_with_blocks_skipped(
    kind: str, changes: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    layers = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 5}
    if changes:
        layers["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"] * 3
    path = tiny(kind, **layers, **changes)
    blocks_at, dropped = ("transformer.h" if kind == "gpt2" else "model.layers"), (1, 3)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    names = depth.renumber(tensors, blocks_at, dropped)
    small = {new: tensors[old] for old, new in names.items()}
    shorter = depth.shorten_config(config, dropped)
    (tmp_path / "config.json").write_text(json.dumps(shorter))
    save_file(small, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.config.num_hidden_layers == 3
    with torch.inference_mode():
        before = whole(TEXT).logits
        skipped = whole.get_submodule(blocks_at)
        left = nn.ModuleList([block for number, block in enumerate(skipped) if number not in dropped])
        whole.set_submodule(blocks_at, left)
        whole.config.num_hidden_layers = 3
        if changes:
            whole.config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
            assert shorter["layer_types"] == whole.config.layer_types
            assert shorter["max_window_layers"] == 1
        expected = whole(TEXT, use_cache=False).logits
        found = model(TEXT, use_cache=False).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(found, before)


def test_what_a_family_reads_off_a_blocks_number_is_written_out() -> None:
    gemma = {"model_type": "gemma2", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
    kinds = ["sliding_attention", "full_attention"] * 3
    assert depth.shorten_config(gemma, (1, 2))["layer_types"] == [kinds[i] for i in (0, 3, 4, 5)]
    experts = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    before = describe(experts)
    assert before and before.dense_layers == (0, 1, 2, 4)
    after = describe(depth.shorten_config(experts, (2, 3)))
    assert after and (after.layers, after.dense_layers) == (4, (0, 1, 2))  # blocks 0, 1 and 4; 5 has experts
    # Infinity as transformers writes it.
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    granite = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}
    short = depth.shorten_config(granite | limit, (0,))
    assert (short["num_hidden_layers"], short["layer_types"]) == (
        2,
        ["attention", "mamba"],
    ) and limit.items() <= short.items()
    llama = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    assert depth.shorten_config(llama, (0,)) == {**llama, "num_hidden_layers": 3}
    gpt2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4}
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx"):
        depth.shorten_config({**gpt2, "scale_attn_by_inverse_layer_idx": True}, (0,))
    assert depth.shorten_config({**gpt2, "scale_attn_by_inverse_layer_idx": False}, (0,))["n_layer"] == 3
