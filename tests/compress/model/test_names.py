"""A checkpoint's names, as transformers' own conversions have them in the model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.model.names import Names, Place
from runtime.errors import UserError

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
