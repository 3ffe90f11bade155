"""int8: one scale per output row; on disk compressed-tensors' `int-quantized` layout.

    weight             int8 [N, K]
    weight_scale       [N, 1], 16 or 32 bit
    weight_zero_point  int8 [N, 1]: read, never written
    input_scale        float32 [1], only with static activations

Experts are written as `pack-quantized` (codes.py, 8 bits) instead: transformers 5 fuses them when it loads, and takes
nothing but `weight_packed` for that.

scale = absmax / 127.5, compressed-tensors' own rule ((2^8 − 1) / 2), and codes round(w / scale). Ours stay within ±127:
−128 would need a tenth of a step more of range at one end, and costs AVX2 its sign trick. A reader meets −128 in other
people's files, and kernels must take it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.codes import read_words, write_words
from runtime.formats.packed import Activation, PackedWeight, Scheme
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import (
    Tensors,
    as_stored,
    check_finite,
    expect_shape,
    fetch,
    read_bias,
    round_scale,
    stored_scale_dtype,
    take,
    with_bias,
)

# Half of the 255 steps that 8 bits span.
STEPS = 127.5
LIMIT = 127


def scheme(activation: Activation = "int8-token") -> Scheme:
    """int8 with a scale per output row; activations per token unless another kind is named."""
    return replace(SCHEMES["int8-dynamic"].scheme(), activation=activation)


def pack(
    weight: Tensor,
    group_size: int = 0,
    *,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    input_scale: Tensor | float | None = None,
) -> PackedWeight:
    """Rounds (N, K) of any float dtype to the nearest code.

    scale_dtype  what the scale will be stored in (None: `stored_scale_dtype` of the weight's): codes are chosen
                 against the rounded scale, so that the file holds exactly what was packed.
    input_scale  the step of the layer's inputs for static activations; rounded like the scale, because loaders keep it
                 in the model's dtype. None: activations per token.

    Raises ValueError for a `group_size` other than 0 (this format has one scale per row), and for an `input_scale` that
    is not one positive number.
    """
    if group_size:
        raise ValueError(f"int8 has one scale per output row (group_size 0), found {group_size}")
    values, dtype = weight.float(), scale_dtype or stored_scale_dtype(weight.dtype)
    absmax = values.abs().amax(dim=1, keepdim=True)
    scale = round_scale(absmax / STEPS, dtype)
    codes = torch.round(values / scale).clamp(-LIMIT, LIMIT).to(torch.int8)
    step = None if input_scale is None else _static(input_scale, dtype)
    chosen = scheme("int8-token" if step is None else "int8-tensor")
    return PackedWeight(chosen, codes, scale, bias=None if bias is None else bias.float(), input_scale=step)


def _static(input_scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A float32 scalar that `dtype` holds."""
    step = torch.as_tensor(input_scale, dtype=torch.float32)
    if step.numel() != 1 or not bool(torch.isfinite(step).all()) or float(step) <= 0:
        raise ValueError(f"input_scale must be one positive number, found {input_scale}")
    return round_scale(step.reshape(()), dtype)


def is_expert(prefix: str) -> bool:
    """Whether a linear layer is one expert of a mixture, which is stored in words."""
    return ".experts." in prefix


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError where the layout cannot hold the weight exactly: an offset, a permutation, groups, a scale or bias
    that its dtype would round.
    """
    if packed.scheme.kind != "int8" or packed.scheme.group_size or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: int-quantized holds symmetric int8 rows, found {packed.scheme}")
    scale = as_stored(f"{prefix}.weight_scale", packed.scale, scale_dtype or stored_scale_dtype(dtype))
    if is_expert(prefix):
        tensors = write_words(prefix, packed, scale)
    else:
        tensors = {f"{prefix}.weight": packed.codes.contiguous(), f"{prefix}.weight_scale": scale}
    if packed.input_scale is not None:
        tensors[f"{prefix}.input_scale"] = packed.input_scale.reshape(1).to(torch.float32)
    return with_bias(tensors, packed, prefix, dtype)


def from_tensors(tensors: Tensors, prefix: str, activation: Activation = "int8-token") -> PackedWeight:
    """Reads `int-quantized` and 8-bit `pack-quantized`, symmetric and with zero points.

    Scales are [N, 1], [N] or [1] (spread over the rows), or [N, G] (groups of K / G inputs). Raises
    UserError naming the tensor for a missing, misshapen or non-finite one, and for inputs with a zero point.
    """
    packed = f"{prefix}.weight_packed" in tensors
    found = read_words(tensors, prefix, 8) if packed else _read_rows(tensors, prefix)
    groups = found.scale.shape[1]
    return replace(
        found,
        scheme=Scheme("int8", 8, 0 if groups == 1 else found.shape[1] // groups, found.offset is None, activation),
        input_scale=_read_static(tensors, prefix) if activation == "int8-tensor" else None,
    )


def _read_rows(tensors: Tensors, prefix: str) -> PackedWeight:
    """`int-quantized`, with the scheme that it would be written with."""
    codes = fetch(tensors, f"{prefix}.weight", torch.int8, matrix=True)
    n, k = codes.shape
    name = f"{prefix}.weight_scale"
    stored = fetch(tensors, name)
    if stored.numel() in (1, n):
        scale = stored.float().reshape(-1, 1).expand(n, 1).contiguous()
    else:
        scale = expect_shape(name, stored, (n, stored.shape[-1])).float().contiguous()
    if k % scale.shape[1]:
        raise UserError(f"tensor {name} has {scale.shape[1]} groups a row, which do not divide {k} inputs")
    name, offset = f"{prefix}.weight_zero_point", None
    if name in tensors:
        zeros = fetch(tensors, name, torch.int8, shape=stored.shape)
        # Older files have zeros beside symmetric weights too.
        offset = scale * zeros.float().view(-1, scale.shape[1]) if bool(zeros.any()) else None
    return PackedWeight(scheme(), codes, scale, offset=offset, bias=read_bias(tensors, prefix, n))


def _read_static(tensors: Tensors, prefix: str) -> Tensor:
    """The static step of the inputs: a positive float32 scalar."""
    name = f"{prefix}.input_zero_point"
    if name in tensors and bool(tensors[name].any()):
        raise UserError(f"tensor {name}: static inputs are read without a zero point; quantise them symmetrically")
    name = f"{prefix}.input_scale"
    step = check_finite(name, expect_shape(name, take(tensors, name).reshape(-1), (1,)))[0].float().clone()
    if float(step) <= 0:
        raise UserError(f"tensor {name} must be positive, found {float(step):g}; calibrate the model again")
    return step
