"""Round to nearest: every weight takes the code nearest to it. Looks at no text.

The formats' own files hold the arithmetic; this one knows which format a recipe's scheme is.
"""

import torch
from torch import Tensor

from runtime.formats import FORMATS, fp8, int4, int8, nf4, ternary
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype

# Bits of the schemes that are kept as int4 is.
BITS = {"int4": 4, "int3": 3, "int2": 2}


def describe(scheme: str, group_size: int, symmetric: bool = True) -> Scheme:
    """The format's description of a recipe's scheme.

    `symmetric` False gives each group a zero point: int4, int3 and int2 only. Raises ValueError for an unknown scheme.
    """
    if not symmetric and scheme not in BITS:
        raise ValueError(f"scheme {scheme!r} has no zero points: {', '.join(BITS)} have")
    if scheme in BITS:
        return int4.scheme(group_size, bits=BITS[scheme], symmetric=symmetric)
    if scheme == "nf4":
        return nf4.scheme(group_size)
    if scheme == "ternary":
        return ternary.scheme()
    if scheme == "fp8":
        return fp8.scheme()
    if scheme not in ("int8-dynamic", "int8-static"):
        raise ValueError(f"scheme {scheme!r} has no description")
    return int8.scheme("int8-tensor" if scheme == "int8-static" else "int8-token")


def quantize(
    weight: Tensor,
    scheme: str,
    group_size: int,
    *,
    symmetric: bool = True,
    input_scale: Tensor | float | None = None,
    search: bool = False,
) -> PackedWeight:
    """Codes and scales of a weight (outputs, inputs) of any float dtype; `group_size` as `plan.Layer` has it.

    symmetric    False: a zero point per group (int4, int3, int2).
    input_scale  the step of the layer's inputs, which int8-static has and no other scheme: somebody looked at text.
    search       int4, int3, int2: ranges of least squared error instead of the weights' own.

    Raises ValueError for an unknown scheme, and for one that asks for another combination of the two.
    """
    if (scheme == "int8-static") != (input_scale is not None):
        raise ValueError(f"scheme {scheme!r}: int8-static needs an input_scale, and the others take none")
    described = describe(scheme, group_size, symmetric)
    if described.kind == "int8":
        return int8.pack(weight, input_scale=input_scale)
    if described.kind == "nf4":
        return nf4.pack(weight)
    if described.kind == "ternary":
        return ternary.pack(weight)
    if described.kind == "fp8":
        return fp8.pack(weight)
    if search:
        return _searched(weight, described)
    return int4.pack(weight, group_size, bits=described.bits, symmetric=symmetric)


def _searched(weight: Tensor, described: Scheme) -> PackedWeight:
    from compress.quantize import grid

    wanted = grid.Grid(described.bits, described.group_size, described.symmetric)
    values = weight.float()
    scale, zero = grid.fit(values, wanted, stored_scale_dtype(weight.dtype), search=True)
    return grid.to_packed(grid.encode(values, scale, zero, wanted), scale, zero, wanted)


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
