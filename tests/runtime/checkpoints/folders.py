"""Models in folders, whole and packed, for tests of reading them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import SINGLE
from runtime.formats import int4
from runtime.formats.packed import PackedWeight

transformers = pytest.importorskip("transformers")


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 17, 33, 2, 90, 41, 8]])


def quantised_names(checkpoint: Checkpoint) -> list[str]:
    return [
        n.removesuffix(".weight")
        for n in checkpoint.names()
        if n.endswith("_proj.weight") or (".experts." in n and n.endswith(".weight"))
    ]


def write_packed(
    source: Path,
    out: Path,
    pack: Callable[[str, Tensor, Tensor | None], PackedWeight],
    dtype: torch.dtype,
    **options: Any,
) -> dict[str, Tensor]:
    """Packs every projection into `out`; returns the dense state dict that it stands for."""
    checkpoint = open_checkpoint(source)
    linears = quantised_names(checkpoint)
    covered = {f"{prefix}.{part}" for prefix in linears for part in ("weight", "bias")}
    stored = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names() if name not in covered}
    dense, schemes = dict(stored), {}
    for prefix in linears:
        name = f"{prefix}.bias"
        bias = checkpoint.tensor(name).to(dtype) if name in checkpoint.names() else None
        packed = pack(prefix, checkpoint.tensor(f"{prefix}.weight").to(dtype), bias)
        stored |= formats.to_tensors(packed, prefix, dtype)
        schemes[prefix] = packed.scheme
        dense[f"{prefix}.weight"] = formats.dequantize(packed)
        if bias is not None:
            dense[name] = bias
    out.mkdir()
    save_file(stored, out / SINGLE, metadata={"format": "pt"})
    config = checkpoint.config | {"quantization_config": formats.hf_config(schemes, ["lm_head"], **options)}
    (out / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return {name: tensor.float() for name, tensor in dense.items()}


def logits_of(path: Path, dense: dict[str, Tensor]) -> Tensor:
    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(dense)
    with torch.no_grad():
        return model(TOKENS).logits


def load_whole(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def in_int4(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return int4.pack(weight, 64 if "down_proj" in prefix else 128, bias=bias)


def assert_same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert float((found - expected.roll(1, dims=-1)).norm() / expected.norm()) > 0.1


def copied(source: Path, out: Path) -> Path:
    out.mkdir()
    for name in ("config.json", SINGLE):
        (out / name).write_bytes((source / name).read_bytes())
    return out
