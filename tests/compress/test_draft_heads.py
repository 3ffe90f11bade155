"""Draft heads that a checkpoint brings go through a run as they are, and the report names them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import compress
from compress.model.plan import make_plan
from compress.model.structure import read_structure
from compress.recipe import Recipe
from runtime import Speculator, load
from runtime.checkpoints.open import open_checkpoint
from runtime.speculative.drafters.by_name import drafter_by_name
from tests.compress.tiny_architectures import make
from tests.runtime.speculative.heads.test_own_layer import model_of_three, write

WHY = "a draft head of the checkpoint, which transformers does not build: carried as it is"


def with_heads(kind: str, source: Path, prefixes: tuple[str, ...]) -> set[str]:
    """Writes a tiny model whose file has a block's tensors once more under each prefix; their names."""
    make(kind, source)
    tensors = load_file(source / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    heads = {
        f"{prefix}{name.removeprefix('model.layers.1.')}": torch.randn_like(tensor.float()).to(tensor.dtype)
        for prefix in prefixes
        for name, tensor in first.items()
    }
    heads[f"{prefixes[0]}eh_proj.weight"] = torch.randn(64, 128, dtype=torch.bfloat16)
    save_file(tensors | heads, source / "model.safetensors", {"format": "pt"})
    return set(heads)


@pytest.mark.parametrize(
    ("kind", "recipe", "prefixes"),
    [
        # A block behind the last one, as DeepSeek and GLM have it, with experts of its own; and a module, as Qwen has.
        pytest.param("deepseek_v3", "int8-dynamic", ("model.layers.2.", "mtp.layers.0."), marks=pytest.mark.slow),
        ("qwen3", "int4-gptq", ("mtp.layers.0.", "eagle.layers.0.")),
    ],
)
def test_they_are_carried_and_named(kind: str, recipe: str, prefixes: tuple[str, ...], tmp_path: Path) -> None:
    heads = with_heads(kind, tmp_path / "source", prefixes)
    options: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}
    folder = compress(tmp_path / "source", recipe, tmp_path / "run", **options).path
    before, after = open_checkpoint(tmp_path / "source").shards, open_checkpoint(folder / "model").shards
    for name in heads:
        assert before.entry(name).dtype == after.entry(name).dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    report = json.loads((folder / "report.json").read_text())
    assert not {layer["name"] for layer in report["quality"]["layers"]} & {n.removesuffix(".weight") for n in heads}
    named = [entry["layer"] for entry in report["left_alone"] if entry["why"] == WHY]
    assert sum(int(entry.partition("(")[2].rstrip(")") or 1) for entry in named) == len(heads)
    # The model itself is read past them.
    assert load(folder / "model", threads=1).decoder.vocab_size == 4096


def test_a_block_behind_the_last_one_is_no_block_and_its_experts_stay(tmp_path: Path) -> None:
    heads = with_heads("deepseek_v3", tmp_path, ("model.layers.2.", "mtp.layers.0."))
    checkpoint, structure = open_checkpoint(tmp_path), read_structure(tmp_path)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    plan = make_plan(shapes, structure, Recipe.load("int8-dynamic").quantize)
    assert {name for name, why in plan.left if why == WHY} == heads and not heads & set(plan.layers)
    assert any(".mlp.experts.3." in name for name in heads) and any(".mlp.experts.3." in name for name in plan.layers)
    assert [part for part, _ in plan.parts if part.startswith("block")] == [f"block {i}" for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("qwen2", "int4-gptq"), ("deepseek_v3", "int8-dynamic")])
def test_a_carried_layer_drafts_for_the_compressed_model(kind: str, recipe: str, tmp_path: Path) -> None:
    write(model_of_three(kind), kind, tmp_path / "source")
    options: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}
    target = load(compress(tmp_path / "source", recipe, tmp_path / "run", **options).path, threads=1)
    named = drafter_by_name(target, "mtp")
    assert named.note == " (the target's own layer)"
    expected = Speculator(target).generate([[5, 6, 7]], 16, stop=())[0]
    found = Speculator(target, named.drafter, 3).generate([[5, 6, 7]], 16, stop=())[0]
    assert found.tokens == expected.tokens and found.metrics.drafted > 10
