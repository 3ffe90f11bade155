"""The trellis recipes on a tiny model: what is written, read by every kernel, and what it becomes in other forms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import Recipe, compress
from compress.errors import UserError
from compress.export import refusal, run
from compress.recipe import Quantize
from runtime import load, native
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from tests.compress.tiny_architectures import make

pytestmark = pytest.mark.skipif(not native.usable("portable")[0], reason=native.usable("portable")[1])
Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trellis") / "run"
    return compress(tiny("llama"), Recipe.load("trellis-3"), out, samples=2, seq_len=32, report=lambda *_: None).model


def logits(path: Path, kernels: str) -> Tensor:
    decoder = load(path, kernels=kernels).decoder
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(64), 0, 20)])
    return decoder.forward(torch.arange(1, 21), rows, cache).logits


def test_every_layer_of_the_blocks_has_sequences(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    assert checkpoint.quantization is not None
    names = checkpoint.quantization["bits"]
    assert len(names) == 7 * 2
    for name in names:
        weight = checkpoint.weight(name)
        assert isinstance(weight, PackedWeight) and weight.tiles is not None and weight.scheme.bits == 3


def test_kernels_agree(made: Path) -> None:
    wanted = logits(made, "reference")
    for path in native.PATHS:
        if native.usable(path)[0]:
            assert torch.equal(logits(made, path), wanted)


def test_an_export_to_int8_is_exact(made: Path, tmp_path: Path) -> None:
    exported = run("compressed-tensors", made, tmp_path / "out")
    assert not exported.losses
    before, after = open_checkpoint(made), open_checkpoint(tmp_path / "out")
    assert before.quantization is not None
    for name in before.quantization["bits"]:
        one, other = before.weight(name), after.weight(name)
        assert isinstance(one, PackedWeight) and isinstance(other, PackedWeight) and other.scheme.kind == "int8"
        assert torch.equal(dequantize(one), dequantize(other))
    assert torch.equal(logits(made, "reference"), logits(tmp_path / "out", "reference"))


def test_forms_without_eight_bits_say_so() -> None:
    assert refusal("compressed-tensors", {"trellis"}) is None
    assert refusal("bitnet", {"trellis"}) is not None


@pytest.mark.parametrize("fold", [True, False])
def test_what_a_stage_may_say(fold: bool) -> None:
    stage = Quantize(scheme="trellis-2", method="gptq", fold=fold)
    assert (stage.damping, stage.fold) == (0.01, fold)
    assert Quantize(scheme="trellis-2").method == "rtn"


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheme": "trellis-3", "method": "awq"},
        {"scheme": "trellis-3", "method": "gptq", "act_order": True},
        {"scheme": "trellis-3", "method": "gptq", "group_size": 128},
        {"scheme": "trellis-3", "fold": True},
        {"scheme": "int4", "method": "gptq", "fold": True},
        {"scheme": "trellis-3", "method": "gptq", "symmetric": False},
    ],
)
def test_what_it_may_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Quantize.model_validate(wrong)


def test_layers_of_other_bits_are_folded_before_any_is_rounded(tiny: Tiny, tmp_path: Path) -> None:
    """A factor of down_proj goes into up_proj, which another part of the stage rounds first."""
    parts = [("trellis-4", "up_proj"), ("trellis-3", "down_proj|o_proj"), ("trellis-4", ".*")]
    layers = [{"scheme": scheme, "method": "gptq", "targets": [target]} for scheme, target in parts]
    recipe = Recipe.model_validate(
        {"name": "mixed", "stages": [{"quantize": {"method": "per-layer", "layers": layers}}]}
    )
    made = compress(tiny("llama"), recipe, tmp_path / "run", samples=2, seq_len=32, report=lambda *_: None).model
    bits = (open_checkpoint(made).quantization or {})["bits"]
    assert {name: bits[f"model.layers.1.mlp.{name}_proj"] for name in ("up", "down")} == {"up": 4, "down": 3}
    assert torch.equal(logits(made, "portable"), logits(made, "reference"))
    # As a whole it is near the original; a factor that was lost would leave nothing of it.
    original = logits(tiny("llama"), "reference")
    assert float((logits(made, "reference") - original).norm() / original.norm()) < 0.45


@pytest.mark.parametrize("scheme", ["int4", "int8-dynamic"])
def test_a_model_has_one_format(scheme: str) -> None:
    layers = [{"scheme": "trellis-3", "method": "gptq", "targets": ["a"]}, {"scheme": scheme, "targets": ["b"]}]
    with pytest.raises(ValueError, match=f"hold together, found trellis-3 and {scheme}"):
        Quantize.model_validate({"method": "per-layer", "layers": layers})


SMALL: dict[str, Any] = {"samples": 2, "seq_len": 32, "report": lambda *_: None}


def with_fold(fold: bool) -> Recipe:
    data = Recipe.load("trellis-3").to_dict()
    data["stages"][0]["quantize"]["fold"] = fold
    return Recipe.model_validate(data)


@pytest.mark.parametrize("recipe", ["trellis-3", "int4-awq", "int8-smoothquant"])
def test_a_family_of_unknown_structure_is_told_before_any_work(recipe: str, tmp_path: Path) -> None:
    make("olmo2", tmp_path / "olmo2")
    asked = with_fold(True) if recipe == "trellis-3" else Recipe.load(recipe)
    with pytest.raises(UserError, match=r"its structure is not known .* the last with fold: auto or false"):
        compress(tmp_path / "olmo2", asked, tmp_path / "run", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["olmo2"]


@pytest.mark.parametrize("recipe", ["trellis-3", "per-layer"])
def test_such_a_family_takes_a_trellis_without_and_is_told_so(recipe: str, tiny: Tiny, tmp_path: Path) -> None:
    make("olmo2", tmp_path / "olmo2")
    layers = [{"scheme": "trellis-3", "method": "gptq", "targets": ["down_proj"]}]
    stages = [{"quantize": {"method": "per-layer", "layers": layers}}]
    own = Recipe.model_validate({"name": "own", "stages": stages})
    asked = own if recipe == "per-layer" else Recipe.load(recipe)
    said: list[str] = []
    made = compress(tmp_path / "olmo2", asked, tmp_path / "run", note=said.append, **SMALL).model
    assert [line for line in said if "olmo2 is not known, so its channels are not scaled" in line]
    if recipe == "trellis-3":
        without = compress(tmp_path / "olmo2", with_fold(False), tmp_path / "without", **SMALL).model
        assert (made / "model.safetensors").read_bytes() == (without / "model.safetensors").read_bytes()
    # Of a family that is known they are, and nothing is said.
    said.clear()
    compress(tiny("llama"), asked, tmp_path / "known", note=said.append, **SMALL)
    assert said and not [line for line in said if "not known" in line]
