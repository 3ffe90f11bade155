"""A checkpoint's names, as transformers' own conversions have them in the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UserError as CompressError
from compress.model.loaders import refusal
from compress.model.names import Names, Place
from compress.model.structure import ModelStructure, read_structure
from runtime.errors import UserError
from runtime.formats.schemes import KINDS
from tests.compress.tiny_architectures import make

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
MIXTURE = SMALL | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def model(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()


@pytest.mark.parametrize(
    ("kind", "tensor", "place"),
    [
        ("gpt_neox", "embed_out.weight", Place("lm_head.weight", False, None)),
        ("gpt_neox", "layers.1.mlp.dense_h_to_4h.bias", Place("gpt_neox.layers.1.mlp.dense_h_to_4h.bias", False, None)),
        (
            "granitemoe",
            "model.layers.1.block_sparse_moe.input_linear.weight",
            Place("model.layers.1.block_sparse_moe.experts.gate_up_proj", False, None),
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.gate.weight",
            Place("model.layers.1.mlp.gate.weight", False, None),
        ),
        ("mixtral", "no.such.tensor", Place("no.such.tensor", False, None)),
    ],
)
def test_names(kind: str, tensor: str, place: Place) -> None:
    assert Names(model(kind, **MIXTURE)).place(tensor) == place


@pytest.mark.parametrize(
    ("kind", "prefix", "layers"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("phimoe", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_layers_of_experts(kind: str, prefix: str, layers: tuple[str, str, str]) -> None:
    names = Names(model(kind, **MIXTURE))
    for layer, part in zip(layers, ("gate_proj", "up_proj", "down_proj"), strict=True):
        place = names.place(f"model.layers.1.{prefix}.experts.3.{layer}.weight")
        assert place.is_part and place.expert == f"model.layers.1.mlp.experts.3.{part}"
        fused = "down_proj" if part == "down_proj" else "gate_up_proj"
        assert place.name == f"model.layers.1.mlp.experts.{fused}"


def test_parameters_are_made_of_their_parts() -> None:
    names = Names(model("qwen3_moe", **MIXTURE))
    prefix = "model.layers.0.mlp.experts"
    parts: dict[str, Tensor] = {
        f"{prefix}.{number}.{part}.weight": torch.randn(48, 32)
        for number in range(4)
        for part in ("gate_proj", "up_proj")
    }
    made = names.make(parts)
    assert list(made) == [f"{prefix}.gate_up_proj"]
    expert = torch.cat([parts[f"{prefix}.2.gate_proj.weight"], parts[f"{prefix}.2.up_proj.weight"]])
    assert torch.equal(made[f"{prefix}.gate_up_proj"][2], expert)
    parts[f"{prefix}.2.up_proj.weight"] = torch.randn(7, 32)
    with pytest.raises(UserError, match="cannot make it"):
        names.make(parts)


def test_blocks_under_another_name_are_not_renumbered(tmp_path: Path) -> None:
    for kind in ("nemotron_h", "bloom"):
        make(kind, tmp_path / kind)
    bloom = read_structure(tmp_path / "bloom")
    bloom.check_renumbering(["h.1.mlp.dense_4h_to_h.weight", "transformer.h.1.mlp.dense_4h_to_h.weight"])
    with pytest.raises(CompressError, match=r"backbone\.layers\.1.*below model\.layers"):
        read_structure(tmp_path / "nemotron_h").check_renumbering(["backbone.layers.1.norm.weight"])


def test_layers_that_loaders_cannot_take(tmp_path: Path) -> None:
    """nanochat's initialisation asks for the weight of one linear layer, falcon has a class of its own for all."""
    for kind in ("nanochat", "falcon"):
        make(kind, tmp_path / kind)
    nanochat, falcon = (read_structure(tmp_path / kind) for kind in ("nanochat", "falcon"))

    def why(model: ModelStructure, tensor: str, kind: str) -> str | None:
        return refusal(model, tensor, model.parameters[tensor], KINDS[kind])

    for model in (nanochat, falcon):
        before = list(model.parameters)
        linears = [name for name, p in model.parameters.items() if p.kind == "linear" and model.block(name) == 1]
        refused = {name for name in linears if why(model, name, "int4")}
        assert {name for name in linears if why(model, name, "int8")} == set()
        if model is nanochat:
            assert refused and refused < set(linears) and any("o_proj" in name for name in refused)
            assert not any(why(model, name, "nf4") for name in linears)
        else:
            assert refused == set(linears) and all("FalconLinear" in str(why(model, name, "nf4")) for name in linears)
        assert [name for name, _ in model.model.named_parameters(remove_duplicate=False)] == before
