"""Weight formats: one file each, and here how they are told apart.

A format file has `scheme`, `pack`, `dequantize`, `to_tensors`, `from_tensors` and `bits_per_weight`.
"""

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats import awq, compressed_tensors, fp8, gptq, int4, int8, llm_int8, nf4, ternary
from runtime.formats.packed import Kind, PackedWeight, Scheme
from runtime.formats.tensors import Tensors, take

FORMATS: dict[Kind, ModuleType] = {"int8": int8, "int4": int4, "nf4": nf4, "ternary": ternary, "fp8": fp8}
_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WHERE = "config.json: quantization_config"


def dequantize(packed: PackedWeight) -> Tensor:
    """(N, K) float32 of any packed weight. Raises ValueError for a kind that has no format file."""
    if packed.scheme.kind not in FORMATS:
        raise ValueError(f"no format for {packed.scheme.kind} weights")
    weight: Tensor = FORMATS[packed.scheme.kind].dequantize(packed)
    return weight


def hf_config(
    layers: Mapping[str, Scheme],
    ignore: Sequence[str] = (),
    *,
    reordered: Collection[str] = (),
    double_quant: bool = True,
    compute: str = "bfloat16",
) -> dict[str, Any]:
    """`quantization_config` for config.json.

    layers        module name → scheme, of every packed linear module, by the names that transformers gives them.
    ignore        linear modules that were left as they are (the head among them).
    reordered     modules whose inputs are stored in activation order (PackedWeight.perm): int4, int3 and int2 only.
    double_quant  and `compute`, the dtype of products: nf4 only.

    Raises ValueError for mixtures that no library reads (nf4 or ternary beside another kind).
    """
    kinds = {scheme.kind for scheme in layers.values()}
    if kinds == {"nf4"}:
        return nf4.hf_config(ignore, double_quant=double_quant, compute=compute)
    if kinds == {"ternary"}:
        return ternary.hf_config(ignore)
    if kinds & {"nf4", "ternary"}:
        raise ValueError(
            "nf4 is bitsandbytes', ternary is bitnet's, and int8 and int4 are compressed-tensors': one checkpoint has"
            " one library"
        )
    return compressed_tensors.hf_config(layers, ignore, reordered)


def check_supported(quantization: Any) -> None:
    """Raises UserError for a `quantization_config` whose weights cannot be read (None: plain weights)."""
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UserError(f"{_WHERE} must be a mapping, found {quantization!r}")
    method = _method(quantization)
    if method == "bitsandbytes":
        kind = quantization.get("bnb_4bit_quant_type")
        four = quantization.get("load_in_4bit") or quantization.get("_load_in_4bit")
        eight = quantization.get("load_in_8bit") or quantization.get("_load_in_8bit")
        if bool(four) == bool(eight) or (four and kind != "nf4"):
            found = f"bnb_4bit_quant_type {kind!r}" if four else f"load_in_4bit {four!r} and load_in_8bit {eight!r}"
            raise UserError(f"{_WHERE}: of bitsandbytes' formats nf4 and LLM.int8 are read, found {found}")
    elif method == "compressed-tensors":
        compressed_tensors.check(quantization)
    elif method == "bitnet":
        ternary.check(quantization)
    elif method == "gptq":
        gptq.check(quantization)
    elif method == "awq":
        awq.check(quantization)
    else:
        raise UserError(
            f"{_WHERE}.quant_method {method!r} is not read; use a plain checkpoint, bitsandbytes nf4 or LLM.int8,"
            " compressed-tensors fp8, int8, int4, int3 or int2, GPTQ, AWQ, or bitnet"
        )


def read(
    quantization: Mapping[str, Any] | None, tensors: Tensors, prefix: str, unpack: bool = True
) -> PackedWeight | Tensor:
    """The weight of linear layer `prefix`, packed or, where it is stored plain, as the (N, K) tensor that it is.

    `unpack` False leaves 4-bit codes two a byte where they are stored so.

    `quantization` has passed `check_supported`. Raises UserError naming the tensor for anything wrong with it.
    """
    packed: PackedWeight | None = None
    method = None if quantization is None else _method(quantization)
    if method == "bitsandbytes" and nf4.holds(tensors, prefix):
        packed = nf4.from_tensors(tensors, prefix, unpack).plain()
    elif method == "bitsandbytes" and llm_int8.holds(tensors, prefix):
        packed = llm_int8.from_tensors(tensors, prefix)
    elif method == "gptq" and quantization is not None and gptq.holds(tensors, prefix):
        packed = gptq.from_tensors(quantization, tensors, prefix)
    elif method == "awq" and quantization is not None and gptq.holds(tensors, prefix):
        packed = awq.from_tensors(quantization, tensors, prefix)
    elif method == "compressed-tensors" and quantization is not None:
        packed = compressed_tensors.read(quantization, tensors, prefix, unpack)
    elif method == "bitnet" and quantization is not None and ternary.holds(tensors, prefix):
        packed = ternary.from_tensors(tensors, prefix, ternary.scale_direction(quantization))
    if packed is None and method in ("bitsandbytes", "bitnet") and _int8_rows(tensors, prefix):
        packed = int8.from_tensors(tensors, prefix)
    if packed is not None:
        return packed
    plain = take(tensors, f"{prefix}.weight")
    if plain.dtype not in _PLAIN:
        raise UserError(
            f"tensor {prefix}.weight holds {str(plain.dtype).removeprefix('torch.')}, which config.json's"
            " quantization_config does not explain; a plain weight is float32, float16 or bfloat16"
        )
    return plain


def holds_fp8(quantization: Mapping[str, Any] | None) -> bool:
    """Whether a `quantization_config` that has passed `check_supported` has fp8 weights."""
    groups = (quantization or {}).get("config_groups") or {}
    return any(group["weights"].get("type") == "float" for group in groups.values())


def _int8_rows(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is int8 with scales, which these two libraries have no word for: the tensors speak for it."""
    name = f"{prefix}.weight"
    return f"{prefix}.weight_scale" in tensors and name in tensors and tensors[name].dtype == torch.int8


def _method(quantization: Mapping[str, Any]) -> Any:
    # Older bitsandbytes checkpoints name no method.
    old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return quantization.get("quant_method") or ("bitsandbytes" if old else None)


__all__ = ["FORMATS", "check_supported", "dequantize", "hf_config", "holds_fp8", "read"]
