"""Zero points: an offset of scale · zero, the zero a whole number on the same scale as the codes."""

import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import group_width, restore_order, spread


def whole_zeros(packed: PackedWeight) -> Tensor | None:
    """(N, G) float32 whole numbers whose products with the scale are exactly the offset; None where there are none.

    Zeros where the weight has no offset. HQQ's offsets are no such products.
    """
    if packed.offset is None:
        return torch.zeros_like(packed.scale)
    zeros = torch.round(packed.offset / packed.scale)
    return zeros if torch.equal(zeros * packed.scale, packed.offset) else None


def dequantize_whole(packed: PackedWeight) -> Tensor:
    """(N, K) float32: (code − zero) · scale in one rounding, as compressed-tensors has it; else as `spread`.

    code · scale − offset rounds three times, which shows where a scale needs more than 16 bits.
    """
    zeros = None if packed.offset is None else whole_zeros(packed)
    if zeros is None:
        return spread(packed.codes.float(), packed)
    n, k = packed.shape
    values = packed.codes.view(n, -1, group_width(k, packed.scheme.group_size)).float() - zeros.unsqueeze(-1)
    return restore_order((values * packed.scale.unsqueeze(-1)).view(n, k), packed.perm)
