"""ternary: codes −1, 0, 1 and one scale for the whole tensor; on disk transformers' `bitnet` layout.

    weight        uint8 [N / 4, K]: code + 1 in two bits; bits 2i of row r hold row i · (N / 4) + r
    weight_scale  [1], in the model's dtype

The rule is BitNet b1.58's: inverse = 1 / max(mean|W|, 1e-5), codes clip(round(W · inverse), −1, 1).

Two directions of the scale are in use. `linear_class` "bitlinear" stores the inverse: weights are codes / weight_scale.
"autobitlinear" with `quantization_mode` "offline" stores the mean: weights are codes · weight_scale. Both are read, and
the first is written: it is the one whose loaded model adds the bias as it is (the other one's multiplies it by the
scale), keeps two bits a weight in memory, and the one that llama.cpp's converter reads, which always divides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.configuration import WHERE
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import KINDS, SCHEMES
from runtime.formats.tensors import (
    SCALES,
    Tensors,
    check_codes,
    expect_shape,
    fetch,
    read_bias,
    stored_scale_dtype,
    with_bias,
)

Direction = Literal["divide", "multiply"]
"""How `weight_scale` meets the codes: divide (it is 1 / mean|W|) or multiply (it is mean|W|)."""

# Codes that share a byte, in rows a quarter of the matrix apart.
PER_BYTE = KINDS["ternary"].outputs
# The least mean magnitude that is divided by.
SMALLEST = 1e-5


def scheme() -> Scheme:
    """ternary, its one scale spread over the output rows; activations per token."""
    return SCHEMES["ternary"].scheme()


def pack(
    weight: Tensor, group_size: int = 0, *, bias: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> PackedWeight:
    """Rounds (N, K) of any float dtype to −1, 0, 1 times the mean magnitude of the whole tensor.

    `scale_dtype` is what the inverse of the scale will be stored in (None: `stored_scale_dtype` of the weight's): codes
    are chosen against the scale that comes back from it (`storable`). Raises ValueError for a `group_size` other than
    0, and for a mean that is not finite or too large to be inverted.
    """
    if group_size:
        raise ValueError(f"ternary has one scale per tensor (group_size 0), found {group_size}")
    values = weight.float()
    dtype = scale_dtype or stored_scale_dtype(weight.dtype)
    # Summed in float64, so that the order of a threaded sum does not reach the file.
    scale = storable(values.abs().mean(dtype=torch.float64), dtype)
    codes = torch.round(values / scale).clamp(-1, 1).to(torch.int8)
    return PackedWeight(scheme(), codes, _rows(scale, weight.shape[0]), bias=None if bias is None else bias.float())


def storable(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales (float32, any shape) that a file holds for mean magnitudes: inverses of values of `dtype`.

    A mean below 1e-5, or below what float16 can hold the inverse of (1.53e-5), becomes that. Raises ValueError for
    means that are not finite or too large to be inverted.
    """
    inverse = (1.0 / mean.clamp(min=SMALLEST)).clamp(max=torch.finfo(dtype).max)
    scale = 1.0 / inverse.to(dtype).float()
    if not bool(torch.isfinite(scale).all()):
        raise ValueError(f"mean magnitudes up to {float(mean.max()):.3g} have no inverse in {dtype}")
    return scale


def _rows(scale: Tensor, outputs: int) -> Tensor:
    """The tensor's scale (one value) as (N, 1), which is what layers that are joined need: each brings its own."""
    return scale.reshape(1, 1).expand(outputs, 1).contiguous()


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file, the scale as "bitlinear" has it (inverted), in `scale_dtype`.

    `dtype` is the model's, which the bias has; a loader casts the scale to it too. Raises ValueError where the layout
    cannot hold the weight exactly: outputs that are no multiple of 4, rows whose scales differ, a scale that is not
    `storable`, a bias that `dtype` would round, an offset, a permutation.
    """
    if packed.scheme != scheme() or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: bitnet holds symmetric ternary weights in input order, found {packed.scheme}")
    n, k = packed.shape
    if n % PER_BYTE:
        raise ValueError(f"{prefix}: bitnet stores outputs in fours and {n} is no multiple of 4; leave the layer alone")
    scale = packed.scale.flatten()
    if not torch.equal(scale, scale[:1].expand(n)):
        raise ValueError(f"{prefix}: bitnet stores one scale per tensor, but those of the rows differ")
    quarters = (check_codes(prefix, packed.codes, -1, 1) + 1).to(torch.uint8).view(PER_BYTE, n // PER_BYTE, k)
    tensors = {
        f"{prefix}.weight": quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6,
        f"{prefix}.weight_scale": _invert(prefix, scale[:1], scale_dtype or stored_scale_dtype(dtype)),
    }
    return with_bias(tensors, packed, prefix, dtype)


def _invert(prefix: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / scale as `dtype`, from which the same float32 scale can be had again. Raises ValueError where it cannot."""
    inverse = (1.0 / scale).to(dtype)
    if not torch.equal(1.0 / inverse.float(), scale):
        raise ValueError(
            f"{prefix}.weight_scale: {dtype} cannot hold the inverse of this scale; choose codes for a `storable` one"
        )
    return inverse


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is stored packed or with a scale: all but plain weights, and the int8 of another format."""
    name = f"{prefix}.weight"
    if name not in tensors:
        return f"{prefix}.weight_scale" in tensors
    stored = tensors[name].dtype
    return stored == torch.uint8 or (f"{prefix}.weight_scale" in tensors and stored != torch.int8)


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer under a configuration that has passed `check`; None where it is stored otherwise."""
    if not holds(tensors, prefix):
        return None
    # "bitlinear" divides by its scale, "autobitlinear" multiplies by it.
    return from_tensors(tensors, prefix, "multiply" if config.get("linear_class") == "autobitlinear" else "divide")


def from_tensors(tensors: Tensors, prefix: str, direction: Direction = "divide") -> PackedWeight:
    """Reads a layer whose scale has that direction.

    With "multiply" a bias is multiplied by the scale as well, because that is what the class computes. Raises UserError
    naming the tensor for a missing, misshapen, non-finite or otherwise damaged one.
    """
    name = f"{prefix}.weight"
    codes = _unpack(name, fetch(tensors, name, torch.uint8, matrix=True))
    scale = _read_scale(tensors, f"{prefix}.weight_scale", direction)
    bias = read_bias(tensors, prefix, codes.shape[0])
    if bias is not None and direction == "multiply":
        bias = bias * scale
    return PackedWeight(scheme(), codes, _rows(scale, codes.shape[0]), bias=bias)


def _unpack(name: str, data: Tensor) -> Tensor:
    """Bytes (N / 4, K) to codes (N, K) int8. Raises UserError where one is 3, which no writer makes."""
    both = data & data >> 1 & 0b01010101
    if bool(both.any()):
        row, column = torch.nonzero(both)[0].tolist()
        raise UserError(
            f"tensor {name} holds the two-bit code 3 (first in the byte at [{row}, {column}]), but ternary weights"
            " have only 0, 1 and 2; the weights are damaged, so fetch them again"
        )
    return torch.cat([(data >> 2 * i & 3).to(torch.int8) - 1 for i in range(PER_BYTE)])


def _read_scale(tensors: Tensors, name: str, direction: Direction) -> Tensor:
    """The tensor's scale [1] in float32, as codes are multiplied by it."""
    value = expect_shape(name, fetch(tensors, name, *SCALES).reshape(-1), (1,)).float()
    scale = 1.0 / value if direction == "divide" else value
    if not (bool(value > 0) and bool(torch.isfinite(scale))):
        raise UserError(
            f"tensor {name} must be a positive scale, found {float(value):.3g}; the weights are damaged, so fetch them"
            " again"
        )
    return scale


def hf_config(skip: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json for bitnet; `skip` are the linear modules that stay, the head among them.

    A loader packs every nn.Linear that is not listed.
    """
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": list(skip),
        "use_rms_norm": False,
        "rms_norm_eps": 1e-6,
    }


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a bitnet configuration that is malformed, or whose weights are not packed ones."""
    kind = config.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise UserError(f"{WHERE}.linear_class must be 'bitlinear' or 'autobitlinear', found {kind!r}")
    # "bitlinear" is always packed: transformers looks at the mode for the other class only.
    mode = config.get("quantization_mode", "offline")
    if kind == "autobitlinear" and mode != "offline":
        raise UserError(
            f"{WHERE}.quantization_mode {mode!r}: weights that are rounded while the model runs are not read; save"
            " them packed ('offline')"
        )
    if config.get("use_rms_norm"):
        raise UserError(f"{WHERE}.use_rms_norm: norms inside linear layers are not read; use a checkpoint without them")
