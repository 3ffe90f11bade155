"""int4: one scale per output row and group of inputs; on disk compressed-tensors' `pack-quantized` (words.py).

scale = absmax / 7.5, compressed-tensors' rule ((2^4 − 1) / 2), codes round(w / scale) in −8..7.
"""

import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import (
    Tensors,
    as_stored,
    group_width,
    read_bias,
    round_scale,
    spread,
    stored_bytes,
    stored_scale_dtype,
)
from runtime.formats.words import read_words, unpack_words, write_words

# Half of the 15 steps that 4 bits span.
STEPS = 7.5
LOW, HIGH = -8, 7


def scheme(group_size: int = 128) -> Scheme:
    """Symmetric int4 with a scale per row and `group_size` inputs (0: per row); activations per token and group."""
    return Scheme("int4", 4, group_size, True, "int8-group")


def pack(
    weight: Tensor, group_size: int = 128, *, bias: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> PackedWeight:
    """Rounds (N, K) of any float dtype to the nearest code; `group_size` 0 is one scale per row.

    `scale_dtype` is what scales will be stored in (None: `stored_scale_dtype` of the weight's): codes are chosen
    against the rounded scale. Raises ValueError where the groups do not divide K: choose another size.
    """
    n, k = weight.shape
    width = group_width(k, group_size)
    values = weight.float().reshape(n, k // width, width)
    absmax = values.abs().amax(dim=-1)
    scale = round_scale(absmax / STEPS, scale_dtype or stored_scale_dtype(weight.dtype))
    codes = torch.round(values / scale.unsqueeze(-1)).clamp(LOW, HIGH).to(torch.int8).view(n, k)
    return PackedWeight(scheme(group_size), codes, scale, bias=None if bias is None else bias.float())


def dequantize(packed: PackedWeight) -> Tensor:
    """(N, K) float32."""
    return spread(packed.codes.float(), packed)


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError where the layout cannot hold the weight exactly: an offset, a permutation, a scale or bias that
    its dtype would round.
    """
    if packed.scheme.kind != "int4" or packed.offset is not None or packed.perm is not None:
        raise ValueError(
            f"{prefix}: pack-quantized is written for symmetric int4 in input order, found {packed.scheme}"
        )
    scale = as_stored(f"{prefix}.weight_scale", packed.scale, scale_dtype or stored_scale_dtype(dtype))
    tensors = write_words(prefix, packed.codes, scale, 4)
    if packed.bias is not None:
        tensors[f"{prefix}.bias"] = as_stored(f"{prefix}.bias", packed.bias, dtype)
    return tensors


def from_tensors(tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight:
    """Reads `pack-quantized` with 4 bits, symmetric; the group size is K over the scales of a row.

    `unpack` False leaves the codes two a byte where a row is whole words.

    Raises UserError naming the tensor for a missing, misshapen, non-finite, asymmetric or reordered one.
    """
    words, scale, inputs = read_words(tensors, prefix, 4)
    n, groups = scale.shape
    whole = not unpack and inputs % 8 == 0
    return PackedWeight(
        scheme(inputs // groups),
        words.contiguous().view(torch.uint8) if whole else unpack_words(words, inputs, 4),
        scale,
        bias=read_bias(tensors, prefix, n),
        nibbles="low" if whole else None,
    )


def bits_per_weight(packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> float:
    """Stored bits over weights: codes, scales and shape, no bias."""
    return 8 * stored_bytes(to_tensors(packed, "layer", dtype)) / packed.codes.numel()
