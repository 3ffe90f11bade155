"""Tiny models whose linear layers are packed by each format's own `pack`, as artifacts have them on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime import formats
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import fp8, int4, int8, nf4, ternary, three_of_four
from runtime.formats.packed import PackedWeight

SCHEMES = (
    "int8",
    "int8-static",
    "int4",
    "int4-asymmetric",
    "int4-rows",
    "int4-ordered",
    "int6",
    "int3",
    "int2-asymmetric",
    "nf4",
    "ternary",
    "ternary-1.25",
)


def pack(kind: str, weight: torch.Tensor) -> PackedWeight:
    """A random float weight (N, K) by the scheme's name."""
    if kind == "int8":
        return int8.pack(weight)
    if kind == "int8-static":
        return int8.pack(weight, input_scale=0.05)
    if kind == "nf4":
        return nf4.pack(weight)
    if kind == "ternary":
        return ternary.pack(weight)
    if kind == "ternary-1.25":
        return three_of_four.pack(weight)
    if kind == "fp8":
        return fp8.pack(weight)
    bits = {"int6": 6, "int4": 4, "int3": 3, "int2": 2}[kind.split("-")[0]]
    size = {"int4-rows": 0, "int4-ordered": 16}.get(kind, 32)
    made = int4.pack(weight, size, bits=bits, symmetric="asymmetric" not in kind)
    if kind != "int4-ordered":
        return made
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    # In memory groups lie together and in input order within; on disk and back that is what comes out.
    order = order.view(-1, size).sort(dim=1).values.flatten()
    packed = int4.pack(weight[:, order], size, bits=bits)
    return PackedWeight(packed.scheme, packed.codes, packed.scale, perm=order, bias=packed.bias)


def write_packed(source: Path, out: Path, kind: str, targets: tuple[str, ...] = ("_proj.weight",)) -> Path:
    """The model at `source` with every weight whose name ends so packed."""
    checkpoint = open_checkpoint(source)
    tensors: dict[str, torch.Tensor] = {}
    schemes: dict[str, Any] = {}
    ordered = []
    for name in checkpoint.names():
        prefix = name.removesuffix(".weight")
        weight = checkpoint.tensor(name)
        if name.endswith(targets) and weight.ndim == 2:
            packed = pack(kind, weight)
            tensors |= formats.to_tensors(packed, prefix, torch.bfloat16)
            schemes[prefix] = packed.scheme
            if packed.perm is not None:
                ordered.append(prefix)
        else:
            tensors[name] = weight.clone()
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    described = formats.hf_config(schemes, ["lm_head"], reordered=ordered)
    (out / "config.json").write_text(json.dumps(checkpoint.config | {"quantization_config": described}))
    return out
