"""Rotated models answer as before, come back when unfolded, and what cannot be rotated is refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from compress.errors import UserError
from compress.model.structure import read_structure
from compress.pipeline import compress
from compress.recipe import Recipe
from compress.recipe.block_stages import Rotate
from compress.rotate.__main__ import app
from compress.rotate.stage import plan, rotate
from compress.rotate.unfold import unfold
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import NORMS, rotation_of
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.models.tiny import tiny_model

Tiny = Callable[..., Path]
# Tied and untied heads, biases, fused projections, norms with an offset, mixtures.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma": {},
    "mixtral": {},
    "qwen3_moe": {},
}
SHARD = 1 << 30


def rotated(model: Path, out: Path, **keys: Any) -> Path:
    checkpoint, structure = open_checkpoint(model), read_structure(model)
    rotate(checkpoint, structure, plan(checkpoint, structure, Rotate(**keys), seed=5), out, SHARD)
    return out


def logits(folder: Path) -> Tensor:
    tokens = torch.randint(1, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens).logits
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def change(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_float_logits_stay_and_the_weights_come_back(family: str, tiny: Tiny, tmp_path: Path) -> None:
    original = tiny(family, **FAMILIES[family])
    model = rotated(original, tmp_path / "rotated")
    before, turned = weights(original), weights(model)
    moved = [name for name in before if before[name].ndim > 1 and change(before[name], turned[name]) > 0.5]
    assert len(moved) > len([name for name in before if before[name].ndim > 1]) * 0.9
    assert change(logits(original), logits(model)) < 1e-5
    unfold(model, tmp_path / "plain", SHARD)
    back = weights(tmp_path / "plain")
    assert back.keys() == before.keys()
    assert max(change(before[name], back[name]) for name in before) < 1e-5
    config = [json.loads((folder / "config.json").read_text()) for folder in (original, tmp_path / "plain")]
    assert config[0].get("tie_word_embeddings") == config[1].get("tie_word_embeddings")
    assert "specpress" not in config[1]


@pytest.mark.parametrize(
    ("kind", "unturned"),
    [
        ("olmoe", ""),
        ("glm4_moe", ""),
        ("qwen3_next", "gates what its heads give"),
        ("qwen3_5_text", "gates what its heads give"),
        ("qwen3_5_moe_text", "gates what its heads give"),
        ("deepseek_v3", "makes its values of latent vectors"),
    ],
)
def test_hybrids_and_further_mixtures(kind: str, unturned: str, tmp_path: Path) -> None:
    """Layers with a state write to the residual stream, too; `unturned`: why values cannot be rotated."""
    model = tiny_model(kind).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * 0.1) if "norm" in name else weight.mul_(4)
    model.save_pretrained(tmp_path / "plain")
    if unturned:
        with pytest.raises(UserError, match=f"a {kind} layer {unturned}, .* set it false"):
            rotated(tmp_path / "plain", tmp_path / "gated")
    turned = rotated(tmp_path / "plain", tmp_path / "turned", values=not unturned)
    assert change(logits(tmp_path / "plain"), logits(turned)) < 1e-5
    unfold(turned, tmp_path / "back", SHARD)
    before, back = weights(tmp_path / "plain"), weights(tmp_path / "back")
    assert back.keys() == before.keys()
    assert max(change(before[name], back[name]) for name in before) < 1e-5


@pytest.mark.parametrize(("residual", "values"), [(True, False), (False, True)])
def test_each_rotation_alone(residual: bool, values: bool, tiny: Tiny, tmp_path: Path) -> None:
    original = tiny("qwen2")
    model = rotated(original, tmp_path / "rotated", residual=residual, values=values)
    record = rotation_of(open_checkpoint(model).config)
    assert record is not None and (bool(record.residual), bool(record.values)) == (residual, values)
    before, turned = weights(original), weights(model)
    up, value = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.bias"
    assert (change(before[up], turned[up]) > 0.1) == residual
    assert (change(before[value], turned[value]) > 0.1) == values
    assert change(logits(original), logits(model)) < 1e-5
    assert (model / NORMS).is_file() == residual


def test_a_tied_head_is_untied_only_where_it_has_to_be(tiny: Tiny, tmp_path: Path) -> None:
    def check(model: Path) -> tuple[bool, bool]:
        checkpoint = open_checkpoint(model)
        return checkpoint.tied, bool(checkpoint.config["tie_word_embeddings"])

    original = tiny("llama")
    assert check(original) == (True, True)
    assert check(rotated(original, tmp_path / "both")) == (False, False)
    assert check(rotated(original, tmp_path / "values", residual=False)) == (True, True)
    # A last norm that multiplies all channels alike passes rotations.
    even = tmp_path / "even"
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    model.model.norm.weight.data.fill_(1.75)
    model.save_pretrained(even)
    assert check(rotated(even, tmp_path / "stays")) == (True, True)
    assert change(logits(even), logits(tmp_path / "stays")) < 1e-5
    unfold(tmp_path / "stays", tmp_path / "back", SHARD)
    found, before = weights(tmp_path / "back"), weights(even)
    assert max(change(before[name], found[name]) for name in before) < 1e-5


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer norm": ("gpt2", {}, "a gpt2 layer cannot be rotated"),
    "norms behind attention": ("gemma2", {"head_dim": 16}, "its post_attention_layernorm multiplies"),
    "hidden size": ("llama", {"hidden_size": 92, "num_attention_heads": 4, "head_dim": 16}, "set residual: false"),
    "heads' size": ("llama", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 18}, "set values: false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rotated_is_refused(case: str, tmp_path: Path) -> None:
    kind, changes, says = REFUSED[case]
    sizes: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}
    sizes |= {"intermediate_size": 64, "num_key_value_heads": 2} if kind != "gpt2" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)))
    model.save_pretrained(tmp_path / "model")
    checkpoint, structure = open_checkpoint(tmp_path / "model"), read_structure(tmp_path / "model")
    with pytest.raises(UserError, match=says):
        plan(checkpoint, structure, Rotate(), 0)
    if says.startswith("set"):
        key = says.split()[1].removesuffix(":")
        assert plan(checkpoint, structure, Rotate(**{key: False}), 0)


def test_a_model_with_towers_is_refused(tmp_path: Path) -> None:
    tiny_model("mistral3", "Mistral3ForConditionalGeneration").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="found towers beside it"):
        plan(open_checkpoint(tmp_path), read_structure(tmp_path), Rotate(residual=False), 0)


def test_a_rotated_model_is_not_rotated_again(tiny: Tiny, tmp_path: Path) -> None:
    model = rotated(tiny("qwen3"), tmp_path / "rotated")
    with pytest.raises(UserError, match="rotated already"):
        plan(open_checkpoint(model), read_structure(model), Rotate(), 0)
    with pytest.raises(UserError, match="nothing is rotated"):
        unfold(tiny("qwen3"), tmp_path / "plain", SHARD)


def test_heads_that_guess_further_tokens_keep_the_residual_stream(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    original = tiny("qwen3")
    model = tmp_path / "model"
    model.mkdir()
    for file in original.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    save_file(weights(original) | {"mtp.fc.weight": torch.ones(64, 128)}, model / "model.safetensors", {"format": "pt"})
    checkpoint, structure = open_checkpoint(model), read_structure(model)
    with pytest.raises(UserError, match=r"mtp\.fc\.weight.*set residual: false"):
        plan(checkpoint, structure, Rotate(), 0)
    rotate(checkpoint, structure, plan(checkpoint, structure, Rotate(residual=False), 0), tmp_path / "out", SHARD)
    assert bool((weights(tmp_path / "out")["mtp.fc.weight"] == 1).all())


def recipe(*stages: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "own", "stages": list(stages)})


GRID = {"scheme": "int4", "group_size": 32, "method": "gptq"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_run_packs_the_rotated_model_and_says_so(family: str, tiny: Tiny, tmp_path: Path) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"samples": 2, "seq_len": 32, "report": lambda *_: None, "note": lines.append}
    run = compress(tiny(family), recipe({"rotate": {}}, {"quantize": GRID}), tmp_path / "run", **options)
    plain = compress(tiny(family), recipe({"quantize": GRID}), tmp_path / "plain", **options)
    checkpoint = open_checkpoint(run.model)
    record = rotation_of(checkpoint.config)
    assert record is not None and record.residual == 64 and record.untied == (family == "llama")
    assert any("the residual stream (64 channels)" in line for line in lines)
    assert any("the tied head is untied" in line for line in lines) == (family == "llama")
    assert checkpoint.quantization is not None
    # Codes are of the rotated weights: unfolded they are as near to the original's as the plain run's are.
    unfold(run.model, tmp_path / "unfolded", SHARD)
    original = weights(tiny(family))
    name = "model.layers.1.self_attn.o_proj.weight"
    found = change(original[name], weights(tmp_path / "unfolded")[name])
    unrotated = open_checkpoint(plain.model).weight(name.removesuffix(".weight"))
    assert isinstance(unrotated, PackedWeight)
    assert 0.01 < found < 1.5 * change(original[name], dequantize(unrotated))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_what_it_has_rotated(tiny: Tiny, tmp_path: Path) -> None:
    def killed(task: str, done: int, total: int) -> None:
        if task == "quantize" and done == 1:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"samples": 2, "seq_len": 32, "report": lambda *_: None}
    whole = recipe({"rotate": {}}, {"quantize": GRID})
    with pytest.raises(KeyboardInterrupt):
        compress(tiny("llama"), whole, tmp_path / "run", progress=killed, **options)
    lines: list[str] = []
    run = compress(tiny("llama"), whole, tmp_path / "run", resume=True, note=lines.append, **options)
    again = compress(tiny("llama"), whole, tmp_path / "again", **options)
    assert not any(line.startswith("rotate:") for line in lines)
    assert (run.model / "model.safetensors").read_bytes() == (again.model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([{"rotate": {"residual": False, "values": False}}], "found neither"),
        ([{"prune": {"method": "magnitude", "sparsity": 0.5}}, {"rotate": {}}], "no prune beside rotate"),
        ([{"quantize": GRID}, {"rotate": {}}], "expected the order"),
        ([{"rotate": {}}, {"quantize": GRID}, {"medusa": {"kind": "medusa-2"}}], "found rotate"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(stages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        recipe(*stages)


def test_the_command_unfolds_and_refuses_in_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    runner = CliRunner()
    model = rotated(tiny("qwen3"), tmp_path / "rotated")
    done = runner.invoke(app, [str(model), str(tmp_path / "plain")])
    assert done.exit_code == 0 and "unfolded" in done.output
    before, back = weights(tiny("qwen3")), weights(tmp_path / "plain")
    assert max(change(before[name], back[name]) for name in before) < 1e-5
    again = runner.invoke(app, [str(model), str(tmp_path / "plain")])
    assert again.exit_code == 2 and "not there yet" in again.output
    other = runner.invoke(app, [str(tiny("qwen3")), str(tmp_path / "other")])
    assert other.exit_code == 2 and "nothing is rotated" in other.output and not (tmp_path / "other").exists()
