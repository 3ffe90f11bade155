"""Weights that a form cannot hold as they are, rounded once more. Whoever calls states the loss."""

from dataclasses import replace

import torch

from compress.quantize import grid
from runtime.formats import dequantize, int8, nf4
from runtime.formats.codes import whole_zeros
from runtime.formats.packed import PackedWeight


def with_whole_zeros(packed: PackedWeight) -> PackedWeight:
    """The same scales with the nearest whole zero points, and the codes nearest to the weights on that grid.

    Itself where the zero points are whole already. Integer kinds only.
    """
    zeros = whole_zeros(packed)
    if zeros is not None or packed.offset is None:
        return packed
    low, high = -(1 << packed.scheme.bits - 1), (1 << packed.scheme.bits - 1) - 1
    exact = packed.offset / packed.scale
    zeros = exact.round().clamp(low, high)
    n, k = packed.shape
    shifted = packed.codes.view(n, exact.shape[1], -1).float() + (zeros - exact).unsqueeze(-1)
    codes = shifted.round().clamp(low, high).to(torch.int8).view(n, k)
    return replace(packed, codes=codes, offset=packed.scale * zeros, scheme=replace(packed.scheme, symmetric=False))


def with_scale_in(packed: PackedWeight, *dtypes: torch.dtype) -> PackedWeight:
    """The same codes with scales rounded to the last of the dtypes; itself where one of them holds all scales.

    A scale that becomes 0 or infinite stays as it is, so that whoever writes it says so.
    """
    if any(torch.equal(packed.scale.to(dtype).float(), packed.scale) for dtype in dtypes):
        return packed
    rounded = packed.scale.to(dtypes[-1]).float()
    scale = torch.where((rounded == 0) | ~torch.isfinite(rounded), packed.scale, rounded)
    zeros = None if packed.offset is None else whole_zeros(packed)
    return replace(packed, scale=scale, offset=packed.offset if zeros is None else zeros * scale)


def to_int4(packed: PackedWeight, group_size: int, dtype: torch.dtype) -> PackedWeight:
    """Rounded to 4 bits with zero points in input order, ranges searched; scales in `dtype`. 0: one scale per row."""
    weight = dequantize(packed)
    wanted = grid.Grid(4, group_size, symmetric=False)
    scale, zero = grid.fit(weight, wanted, dtype, search=True)
    return grid.to_packed(grid.encode(weight, scale, zero, wanted), scale, zero, wanted, bias=packed.bias)


def to_int8_rows(packed: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """Rounded to symmetric int8 with one scale per output row, in `dtype`."""
    return int8.pack(dequantize(packed), bias=packed.bias, scale_dtype=dtype)


def to_nf4(packed: PackedWeight) -> nf4.Nf4Weight:
    """Rounded to nf4, doubly quantised."""
    return nf4.pack(dequantize(packed), bias=packed.bias)
