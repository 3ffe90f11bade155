"""int4, with int3 and int2 in the same container, and int6 with int5: a scale per output row and group of inputs.

Codes lie in words (codes.py).

Symmetric: scale = absmax / ((2^b − 1) / 2), compressed-tensors' rule, and codes round(w / scale). Asymmetric: scale =
(max − min) / (2^b − 1) over a range that holds 0, a zero point per group, zero = round(−2^(b−1) − min / scale), and
codes round(w / scale + zero). Codes and zero points lie in −2^(b−1)..2^(b−1) − 1.
"""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.formats.codes import read_words, write_words
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import GRID_KINDS, SCHEMES
from runtime.formats.tensors import Tensors, as_stored, group_width, round_scale, stored_scale_dtype, with_bias

BITS = tuple(GRID_KINDS)


def scheme(group_size: int = 128, *, bits: int = 4, symmetric: bool = True) -> Scheme:
    """Codes of 2 to 6 bits, a scale per row and `group_size` inputs (0: per row); activations per token and group.

    Raises ValueError for other bits.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, found {bits}")
    return SCHEMES[f"int{bits}"].scheme(group_size, symmetric)


def pack(
    weight: Tensor,
    group_size: int = 128,
    *,
    bits: int = 4,
    symmetric: bool = True,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Rounds (N, K) of any float dtype to the nearest code; `group_size` 0 is one scale per row.

    `scale_dtype` is what scales will be stored in (None: `stored_scale_dtype` of the weight's): codes are chosen
    against the rounded scale. Raises ValueError where the groups do not divide K, and for other bits than 2 to 6.
    """
    n, k = weight.shape
    chosen = scheme(group_size, bits=bits, symmetric=symmetric)
    width = group_width(k, group_size)
    values = weight.float().reshape(n, k // width, width)
    low, steps = -(1 << bits - 1), (1 << bits) - 1
    dtype = scale_dtype or stored_scale_dtype(weight.dtype)
    zero = offset = None
    if symmetric:
        scale = round_scale(values.abs().amax(dim=-1) / (steps / 2), dtype)
    else:
        # 0 must have a code of its own: a pruned weight stays exactly 0.
        least, most = values.amin(dim=-1).clamp(max=0), values.amax(dim=-1).clamp(min=0)
        scale = round_scale((most - least) / steps, dtype)
        zero = torch.round(low - least / scale).clamp(low, low + steps)
        offset = zero * scale
    shifted = values / scale.unsqueeze(-1)
    if zero is not None:
        shifted += zero.unsqueeze(-1)
    codes = torch.round(shifted).clamp(low, low + steps).to(torch.int8).view(n, k)
    return PackedWeight(chosen, codes, scale, offset=offset, bias=None if bias is None else bias.float())


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError where the layout cannot hold the weight exactly: an offset that no zero point gives, or one of a
    symmetric scheme, a scale or bias that its dtype would round.
    """
    if packed.scheme.kind not in GRID_KINDS.values() or (packed.scheme.symmetric and packed.offset is not None):
        raise ValueError(f"{prefix}: pack-quantized is written for integers of 2 to 6 bits, found {packed.scheme}")
    scale = as_stored(f"{prefix}.weight_scale", packed.scale, scale_dtype or stored_scale_dtype(dtype))
    tensors = write_words(prefix, packed, scale)
    return with_bias(tensors, packed, prefix, dtype)


def from_tensors(
    tensors: Tensors, prefix: str, unpack: bool = True, *, bits: int = 4, per_row: bool = False
) -> PackedWeight:
    """Reads `pack-quantized` with 2 to 6 bits, as `read_words` does.

    per_row  a single scale per row is described as such (group_size 0), not as one group of K.
    """
    found = read_words(tensors, prefix, bits, unpack)
    if per_row and found.scale.shape[1] == 1:
        return replace(found, scheme=replace(found.scheme, group_size=0))
    return found
