"""Weight formats: a table of schemes (schemes.py), one file each, and here how files are told apart.

A format file has `pack`, `to_tensors` and `from_tensors`, and a reader for a library's files has `check`
and `read`. They are imported when they are needed, so that looking something up in the table costs no torch.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError
from runtime.formats.configuration import WHERE
from runtime.formats.schemes import KINDS, READERS, Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runtime.formats.packed import PackedWeight
    from runtime.formats.tensors import Tensors


def dequantize(packed: "PackedWeight") -> "Tensor":
    """(N, K) float32 of any packed weight. Raises ValueError for a kind that has no format file."""
    from runtime.formats.codes import dequantize_whole
    from runtime.formats.tensors import spread

    if packed.scheme.kind not in KINDS:
        raise ValueError(f"no format for {packed.scheme.kind} weights")
    kind = KINDS[packed.scheme.kind]
    if kind.levels:
        return spread(kind.format.LEVELS.to(packed.codes.device)[packed.codes.long()], packed)
    return dequantize_whole(packed)


def to_tensors(packed: "PackedWeight", prefix: str, dtype: "torch.dtype") -> "dict[str, Tensor]":
    """The layer's tensors as its format stores them; `dtype` is the original weight's.

    Raises ValueError where the format cannot hold the weight exactly.
    """
    stored: dict[str, Tensor] = KINDS[packed.scheme.kind].format.to_tensors(packed, prefix, dtype)
    return stored


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
    reordered     modules whose inputs are stored in activation order (PackedWeight.perm): int6 to int2 only.
    double_quant  and `compute`, the dtype of products: nf4 only.

    Raises ValueError for mixtures that no library reads (nf4 or ternary beside another kind).
    """
    from runtime.formats import compressed_tensors, nf4, three_of_four, trellis

    kinds = {KINDS[scheme.kind] for scheme in layers.values()}
    libraries = {kind.library for kind in kinds}
    if len(libraries) > 1:
        raise ValueError(
            "nf4 is bitsandbytes', ternary is bitnet's, a trellis and ternary-1.25 are our own, and int8 and int4 are"
            " compressed-tensors': one checkpoint has one library"
        )
    if not layers or libraries == {"compressed-tensors"}:
        return compressed_tensors.hf_config(layers, ignore, reordered)
    if libraries == {"bitsandbytes"}:
        return nf4.hf_config(ignore, double_quant=double_quant, compute=compute)
    # A library with one kind of codes: its format file says how it is named.
    own = kinds.pop().format
    config: dict[str, Any] = own.hf_config(layers, ignore) if own in (three_of_four, trellis) else own.hf_config(ignore)
    return config


def check_supported(quantization: Any) -> None:
    """Raises UserError for a `quantization_config` whose weights cannot be read (None: plain weights)."""
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UserError(f"{WHERE} must be a mapping, found {quantization!r}")
    method = _method(quantization)
    if not isinstance(method, str) or method not in READERS:
        raise UserError(
            f"{WHERE}.quant_method {method!r} is not read; use a plain checkpoint, bitsandbytes nf4 or LLM.int8,"
            " compressed-tensors fp8, int8 or int6 to int2, GPTQ, AWQ, mxfp4, bitnet, specpress-ternary or"
            " specpress-trellis"
        )
    import_module(READERS[method]).check(quantization)


def read(
    quantization: Mapping[str, Any] | None, tensors: "Tensors", prefix: str, unpack: bool = True
) -> "PackedWeight | Tensor":
    """The weight of linear layer `prefix`, packed or, where it is stored plain, as the (N, K) tensor that it is.

    `unpack` False leaves 4-bit codes two a byte where they are stored so.

    `quantization` has passed `check_supported`. Raises UserError naming the tensor for anything wrong with it.
    """
    import torch

    from runtime.formats import int8
    from runtime.formats.tensors import ReadOnce, take

    name, tensors = f"{prefix}.weight", ReadOnce(tensors)
    if quantization is not None:
        method = _method(quantization)
        packed: PackedWeight | None = import_module(READERS[method]).read(quantization, tensors, prefix, unpack)
        if packed is not None:
            return packed
        # These libraries have no word for int8 rows with scales, which heads are: the tensors speak for them.
        rows = f"{prefix}.weight_scale" in tensors and name in tensors and tensors[name].dtype == torch.int8
        if rows and method in ("bitsandbytes", "bitnet", "specpress-ternary", "specpress-trellis"):
            return int8.from_tensors(tensors, prefix)
    plain = take(tensors, name)
    if plain.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise UserError(
            f"tensor {name} holds {str(plain.dtype).removeprefix('torch.')}, which config.json's"
            " quantization_config does not explain; a plain weight is float32, float16 or bfloat16"
        )
    return plain


def _method(quantization: Mapping[str, Any]) -> Any:
    # Older bitsandbytes checkpoints name no method.
    old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return quantization.get("quant_method") or ("bitsandbytes" if old else None)


__all__ = ["check_supported", "dequantize", "hf_config", "read", "to_tensors"]
