"""Round to nearest: every weight takes the code nearest to it. Looks at no text.

The formats' own files hold the arithmetic; schemes.py says which format a recipe's scheme is.
"""

from typing import Any

import torch
from torch import Tensor

from compress.quantize import grid
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import named
from runtime.formats.tensors import stored_scale_dtype


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

    symmetric    False: a zero point per group (int6 to int2).
    input_scale  the step of the layer's inputs, which int8-static has and no other scheme: somebody looked at text.
    search       int6 to int2: ranges of least squared error instead of the weights' own.

    Raises ValueError for an unknown scheme, and for one that asks for another combination of the two.
    """
    row = named(scheme)
    if row.is_static != (input_scale is not None):
        raise ValueError(f"scheme {scheme!r}: int8-static needs an input_scale, and the others take none")
    described = row.scheme(group_size, symmetric)
    options: dict[str, Any] = {"input_scale": input_scale} if row.is_static else {}
    if row.is_grid:
        if search:
            wanted, values = grid.Grid(described.bits, described.group_size, described.symmetric), weight.float()
            scale, zero = grid.fit(values, wanted, stored_scale_dtype(weight.dtype), search=True)
            return grid.to_packed(grid.encode(values, scale, zero, wanted), scale, zero, wanted)
        options = {"bits": row.bits, "symmetric": symmetric}
    if row.codes.has_tiles:
        options = {"bits": row.bits}
    packed: PackedWeight = row.codes.format.pack(weight, described.group_size, **options)
    return packed


def relative_error(weight: Tensor, other: Tensor) -> float:
    """‖W − Ŵ‖ / ‖W‖ (Frobenius); 0 for a weight of zeros that stayed zeros."""
    exact = weight.float()
    norm = torch.linalg.vector_norm(exact, dtype=torch.float64)
    distance = torch.linalg.vector_norm(exact - other, dtype=torch.float64)
    return float(distance / norm) if norm > 0 else float(distance)
