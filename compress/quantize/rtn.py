"""Round to nearest: every weight takes the code nearest to it. Looks at no text.

The formats' own files hold the arithmetic; this one knows which format a recipe's scheme is.
"""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.formats import FORMATS, int4, int8, nf4
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype

# int3 and int2 are int4's container with fewer bits.
BITS = {"int4": 4, "int3": 3, "int2": 2}


def describe(scheme: str, group_size: int, symmetric: bool = True) -> Scheme:
    """The format's description of a recipe's scheme."""
    if scheme == "int8-dynamic":
        return int8.scheme()
    if scheme == "int8-static":
        return replace(int8.scheme(), activation="int8-tensor")
    if scheme in BITS:
        return replace(int4.scheme(group_size), bits=BITS[scheme], symmetric=symmetric)
    return nf4.scheme(group_size)


def quantize(
    weight: Tensor, scheme: str, group_size: int, symmetric: bool = True, search: bool = False
) -> PackedWeight:
    """Codes and scales of a weight (outputs, inputs) of any float dtype; `group_size` as `plan.Layer` has it.

    search  groups of integers: whether ranges are searched for the least squared error.
    """
    if scheme in BITS and (scheme != "int4" or not symmetric or search):
        from compress.quantize import grid

        wanted = grid.Grid(BITS[scheme], group_size, symmetric)
        values = weight.float()
        scale, zero = grid.fit(values, wanted, stored_scale_dtype(weight.dtype), search=search)
        return grid.to_packed(grid.encode(values, scale, zero, wanted), scale, zero, wanted)
    if scheme == "int8-dynamic":
        return int8.pack(weight)
    if scheme == "int4":
        return int4.pack(weight, group_size)
    if scheme == "nf4":
        return nf4.pack(weight)
    raise ValueError(f"scheme {scheme!r} has no rounding")


def to_tensors(packed: PackedWeight, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's tensors as its format stores them; `dtype` is the original weight's."""
    stored: dict[str, Tensor] = FORMATS[packed.scheme.kind].to_tensors(packed, prefix, dtype)
    return stored


def relative_error(weight: Tensor, other: Tensor) -> float:
    """‖W − Ŵ‖ / ‖W‖ (Frobenius); 0 for a weight of zeros that stayed zeros."""
    exact = weight.float()
    norm = torch.linalg.vector_norm(exact, dtype=torch.float64)
    distance = torch.linalg.vector_norm(exact - other, dtype=torch.float64)
    return float(distance / norm) if norm > 0 else float(distance)
