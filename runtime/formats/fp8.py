"""fp8: OCP's E4M3 (4 bits of exponent, 3 of mantissa, largest 448), one scale per output row; on disk
compressed-tensors' `float-quantized` layout.

    weight        float8_e4m3fn [N, K]
    weight_scale  [N, 1], or [1] for the whole tensor, 16 or 32 bit
    input_scale   float32 [1], only with static inputs: for engines that round these to fp8 as well

Here inputs stay float32, whatever the file says of them: products are those of the weights alone, nearer to the
original model than fp8's own and the same on machines without fp8.
"""

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import (
    SCALES,
    Tensors,
    as_stored,
    expect_shape,
    fetch,
    read_bias,
    round_scale,
    stored_scale_dtype,
    with_bias,
)

DTYPE = torch.float8_e4m3fn
LIMIT = 448.0


def scheme() -> Scheme:
    """E4M3 with a scale per output row; inputs stay float."""
    return SCHEMES["fp8"].scheme()


def pack(
    weight: Tensor, group_size: int = 0, *, bias: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> PackedWeight:
    """Rounds (N, K) of any float dtype to the nearest code, the scale being a row's absmax / 448.

    scale_dtype  what the scale will be stored in (None: `stored_scale_dtype` of the weight's): codes are chosen
                 against the rounded scale, so that the file holds exactly what was packed.

    Raises ValueError for a `group_size` other than 0 (this format has one scale per row).
    """
    if group_size:
        raise ValueError(f"fp8 has one scale per output row (group_size 0), found {group_size}")
    values = weight.float()
    absmax = values.abs().amax(dim=1, keepdim=True)
    scale = round_scale(absmax / LIMIT, scale_dtype or stored_scale_dtype(weight.dtype))
    # A scale that was rounded down takes the largest weight beyond 448, which E4M3 would turn into NaN.
    codes = (values / scale).clamp(-LIMIT, LIMIT).to(DTYPE)
    return PackedWeight(scheme(), codes, scale, bias=None if bias is None else bias.float())


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError where the layout cannot hold the weight exactly: an offset, a permutation, groups, a scale or bias
    that its dtype would round.
    """
    if packed.scheme != scheme() or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: float-quantized holds symmetric fp8 rows in input order, found {packed.scheme}")
    tensors = {
        f"{prefix}.weight": packed.codes.contiguous(),
        f"{prefix}.weight_scale": as_stored(
            f"{prefix}.weight_scale", packed.scale, scale_dtype or stored_scale_dtype(dtype)
        ),
    }
    return with_bias(tensors, packed, prefix, dtype)


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer's weight is stored as E4M3."""
    name = f"{prefix}.weight"
    return name in tensors and tensors[name].dtype == DTYPE


def from_tensors(tensors: Tensors, prefix: str) -> PackedWeight:
    """Reads a layer; one scale for the tensor is spread over its rows, which joined layers need.

    Raises UserError naming the tensor for a missing, misshapen or non-finite one, and for zero points.
    """
    codes = fetch(tensors, f"{prefix}.weight", DTYPE, matrix=True)
    name = f"{prefix}.weight_scale"
    stored = fetch(tensors, name, *SCALES)
    n = codes.shape[0]
    if stored.numel() != 1:
        expect_shape(name, stored.reshape(-1, 1) if stored.ndim == 1 else stored, (n, 1))
    name = f"{prefix}.weight_zero_point"
    if name in tensors and bool(tensors[name].float().any()):
        raise UserError(f"tensor {name}: fp8 weights are read without zero points; quantise them symmetrically")
    scale = stored.float().reshape(-1, 1).expand(n, 1).contiguous()
    return PackedWeight(scheme(), codes, scale, bias=read_bias(tensors, prefix, n))
