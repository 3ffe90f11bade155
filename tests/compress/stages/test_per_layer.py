"""Layers with schemes of their own in one model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import Recipe, compress
from compress.errors import UserError
from compress.stages.sensitivity import Candidate, nearest
from runtime import load
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

Tiny = Callable[..., Path]


def recipe(*layers: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "mine", "stages": [{"quantize": {"method": "per-layer", "layers": layers}}]})


def run(path: Path, out: Path, mine: Recipe) -> Path:
    return compress(path, mine, out, samples=2, seq_len=32, report=lambda *_: None).model


MINE = recipe(
    {"scheme": "int8-dynamic", "targets": [r"0\.self_attn"]},
    {"scheme": "int4", "group_size": 32, "method": "gptq", "targets": ["self_attn"]},
    {"scheme": "int3", "group_size": 64, "targets": ["gate_proj", "up_proj"]},
)


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny("llama"), tmp_path_factory.mktemp("mine") / "run", MINE)


def test_the_first_pattern_that_matches_counts(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    found = {}
    for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.down_proj"):
        weight = checkpoint.weight(f"model.layers.{name}")
        found[name] = (weight.scheme.bits, weight.scheme.group_size) if isinstance(weight, PackedWeight) else None
    assert found == {
        "0.self_attn.q_proj": (8, 0),
        "1.self_attn.q_proj": (4, 32),
        "0.mlp.up_proj": (3, 64),
        "1.mlp.down_proj": None,
    }


def test_rounding_to_nearest_is_by_searched_ranges_and_gptq_is_not_rounding(tiny: Tiny, made: Path) -> None:
    before, after = open_checkpoint(tiny("llama")), open_checkpoint(made)

    def error(name: str, candidate: Candidate) -> tuple[float, float]:
        """Squared error of what was written, and of plain rounding."""
        original, packed = before.tensor(f"{name}.weight").float(), after.weight(name)
        assert isinstance(packed, PackedWeight)
        plain = nearest(original, candidate)
        return float((dequantize(packed) - original).square().sum()), float((plain - original).square().sum())

    searched, plain = error("model.layers.0.mlp.up_proj", Candidate(3, 64))
    assert searched < plain
    fitted, plain = error("model.layers.1.self_attn.q_proj", Candidate(4, 32))
    assert fitted != plain


def test_a_layer_in_act_order_is_what_a_stage_in_act_order_makes_of_it(tiny: Tiny, tmp_path: Path) -> None:
    every = {"scheme": "int4", "group_size": 32, "method": "gptq"}
    stage = {**every, "act_order": True, "search": True}
    whole = Recipe.model_validate({"name": "whole", "stages": [{"quantize": stage}]})
    found = {
        "whole": run(tiny("llama"), tmp_path / "whole", whole),
        "ordered": run(tiny("llama"), tmp_path / "ordered", recipe({**every, "act_order": True, "targets": [".*"]})),
        "plain": run(tiny("llama"), tmp_path / "plain", recipe({**every, "targets": [".*"]})),
    }
    name = "model.layers.0.mlp.up_proj.weight_packed"
    codes = {key: open_checkpoint(folder).tensor(name) for key, folder in found.items()}
    assert torch.equal(codes["whole"], codes["ordered"]) and not torch.equal(codes["whole"], codes["plain"])


def test_the_model_decodes_and_transformers_loads_it(made: Path) -> None:
    from transformers import AutoModelForCausalLM

    from runtime.contract import Rows

    tokens = torch.arange(1, 25)
    decoder = load(made, threads=1).decoder
    cache = decoder.new_cache()
    handle = cache.open(len(tokens))
    ours = decoder.forward(tokens, Rows.chains([(handle, 0, len(tokens))]), cache).logits
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(tokens[None]).logits[0]
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_a_pattern_that_matches_nothing_is_told(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'o_prj' matches no linear layer"):
        run(tiny("llama"), tmp_path / "run", recipe({"scheme": "int4", "targets": ["o_prj", "q_proj"]}))


def test_experts_are_not_taken_apart(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="per-layer does not take experts apart"):
        run(tiny("mixtral"), tmp_path / "run", recipe({"scheme": "int4", "targets": [".*"]}))
