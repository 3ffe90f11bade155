"""Round to nearest: every weight takes the code nearest to it. Looks at no text.

The formats' own files hold the arithmetic; this one knows which format a recipe's scheme is.
"""

import torch
from torch import Tensor

from runtime.formats import FORMATS, int4, int8, nf4
from runtime.formats.packed import PackedWeight, Scheme


def describe(scheme: str, group_size: int) -> Scheme:
    """The format's description of a recipe's scheme."""
    if scheme == "int8-dynamic":
        return int8.scheme()
    return int4.scheme(group_size) if scheme == "int4" else nf4.scheme(group_size)


def quantize(weight: Tensor, scheme: str, group_size: int) -> PackedWeight:
    """Codes and scales of a weight (outputs, inputs) of any float dtype; `group_size` as `plan.Layer` has it."""
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
