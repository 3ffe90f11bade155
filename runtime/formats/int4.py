"""int4: one scale per output row and group of inputs; on disk compressed-tensors' `pack-quantized` layout.

    weight_packed  int32 [N, ceil(K / 8)]: code + 8, eight to a word along K, the first in the lowest bits
    weight_scale   [N, K / group], 16 or 32 bit
    weight_shape   int64 [2] = [N, K]

scale = absmax / 7.5, compressed-tensors' rule ((2^4 − 1) / 2), codes round(w / scale) in −8..7.
"""

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import (
    Tensors,
    as_stored,
    check_codes,
    check_finite,
    expect_dtype,
    expect_shape,
    group_width,
    read_bias,
    round_scale,
    spread,
    stored_bytes,
    stored_scale_dtype,
    take,
)

# Half of the 15 steps that 4 bits span.
STEPS = 7.5
LOW, HIGH = -8, 7
PER_WORD = 8


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


def pack_words(codes: Tensor) -> Tensor:
    """(N, K) int8 in −8..7 to int32 [N, ceil(K / 8)]; a ragged last word is filled up with zero bits."""
    k = codes.shape[1]
    nibbles = torch.nn.functional.pad((codes + 8).to(torch.uint8), (0, -k % PER_WORD))
    # Two nibbles to a byte, four bytes to a word: the file's words are little-endian, as is every host of safetensors.
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)


def unpack_words(words: Tensor, inputs: int) -> Tensor:
    """int32 [N, ceil(K / 8)] to (N, K) int8 in −8..7; K = `inputs`."""
    octets = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).view(words.shape[0], -1)
    return nibbles[:, :inputs].to(torch.int8).sub_(8)


def to_tensors(packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is that of scales and bias.

    Raises ValueError where the layout cannot hold the weight exactly: an offset, a permutation, a scale or bias that
    `dtype` would round.
    """
    if packed.scheme.kind != "int4" or packed.offset is not None or packed.perm is not None:
        raise ValueError(
            f"{prefix}: pack-quantized is written for symmetric int4 in input order, found {packed.scheme}"
        )
    tensors = {
        f"{prefix}.weight_packed": pack_words(check_codes(prefix, packed.codes, LOW, HIGH)),
        f"{prefix}.weight_scale": as_stored(f"{prefix}.weight_scale", packed.scale, dtype),
        f"{prefix}.weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    if packed.bias is not None:
        tensors[f"{prefix}.bias"] = as_stored(f"{prefix}.bias", packed.bias, dtype)
    return tensors


def from_tensors(tensors: Tensors, prefix: str) -> PackedWeight:
    """Reads `pack-quantized` with 4 bits, symmetric; the group size is K over the scales of a row.

    Raises UserError naming the tensor for a missing, misshapen, non-finite, asymmetric or reordered one.
    """
    for name in (f"{prefix}.weight_zero_point", f"{prefix}.weight_g_idx"):
        if name in tensors:
            raise UserError(f"tensor {name}: asymmetric and reordered int4 weights are not read yet")
    name = f"{prefix}.weight_shape"
    n, k = (int(size) for size in expect_shape(name, take(tensors, name), (2,)))
    name = f"{prefix}.weight_packed"
    words = expect_dtype(name, take(tensors, name), torch.int32)
    if n < 1 or k < 1:
        raise UserError(f"tensor {prefix}.weight_shape must hold two positive sizes, found {n} and {k}")
    expect_shape(name, words, (n, -(-k // PER_WORD)))
    name = f"{prefix}.weight_scale"
    scale = check_finite(name, take(tensors, name)).float()
    if scale.ndim != 2 or scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise UserError(
            f"tensor {name} has shape {list(scale.shape)}, expected [{n}, groups] with groups that divide {k} inputs"
        )
    return PackedWeight(
        scheme(k // scale.shape[1]),
        unpack_words(words, k),
        scale.contiguous(),
        bias=read_bias(tensors, prefix, n),
    )


def bits_per_weight(packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> float:
    """Stored bits over weights: codes, scales and shape, no bias."""
    return 8 * stored_bytes(to_tensors(packed, "layer", dtype)) / packed.codes.numel()
