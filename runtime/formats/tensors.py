"""What every weight format needs: named tensors, checked shapes and values, scales that survive being written."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

# What scales are stored in.
SCALES = (torch.float16, torch.bfloat16, torch.float32)
# Tensors by full name; a checkpoint's shards are one that reads lazily.
Tensors = Mapping[str, Tensor]


class ReadOnce(Mapping[str, Tensor]):
    """Tensors of which each is read once: a layer's format asks for some of them several times, and a checkpoint reads
    them anew each time."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._tensors[name]
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def take(tensors: Tensors, name: str) -> Tensor:
    """The tensor called `name`. Raises UserError where it is missing."""
    if name not in tensors:
        raise UserError(f"tensor {name} is missing; the checkpoint is incomplete, so fetch or write it again")
    return tensors[name]


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """`tensor` itself, if it has no NaN and no infinity; one pass and no copy where all is well.

    Raises UserError naming the tensor, the first bad place and how many there are.
    """
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return tensor
    values = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # fp8 has no minimum in torch
    low, high = torch.aminmax(values)
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return tensor
    bad = torch.nonzero(~torch.isfinite(values))
    place = ", ".join(str(int(i)) for i in bad[0])
    raise UserError(
        f"tensor {name} must be finite, but {len(bad)} of its {values.numel()} values are NaN or infinite (the first at"
        f" [{place}]); the weights are damaged, so fetch them again"
    )


def expect_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor` itself, if it has that shape. Raises UserError otherwise."""
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(
            f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}; the weights and config.json do not"
            " belong together"
        )
    return tensor


def expect_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """`tensor` itself, if it has one of the dtypes. Raises UserError otherwise."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UserError(f"tensor {name} must be {allowed}, found {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def fetch(
    tensors: Tensors, name: str, *dtypes: torch.dtype, shape: Sequence[int] | None = None, matrix: bool = False
) -> Tensor:
    """The tensor called `name`, all of whose numbers are finite. Raises UserError where it is not as expected.

    dtypes  of which it has one; none: any.   shape  that it has; None: any.
    matrix  it has two dimensions, and values.
    """
    tensor = take(tensors, name)
    if dtypes:
        expect_dtype(name, tensor, *dtypes)
    if shape is not None:
        expect_shape(name, tensor, shape)
    if matrix and (tensor.ndim != 2 or 0 in tensor.shape):
        raise UserError(f"tensor {name} must have two dimensions and values, found shape {list(tensor.shape)}")
    return check_finite(name, tensor)


def check_codes(name: str, codes: Tensor, low: int, high: int) -> Tensor:
    """`codes` itself, if all lie in low..high. Raises ValueError otherwise: a quantiser went wrong."""
    if codes.numel():
        least, most = torch.aminmax(codes)
        if int(least) < low or int(most) > high:
            raise ValueError(f"{name}: codes must lie in {low}..{high}, found {int(least)}..{int(most)}")
    return codes


def stored_scale_dtype(weight: torch.dtype) -> torch.dtype:
    """The dtype that scales are stored in: the weight's own 16-bit one, and bfloat16 for wider weights.

    bfloat16 has float32's range, and codes are chosen after the scale was rounded, so wider scales buy nothing.
    """
    return weight if weight in (torch.float16, torch.bfloat16) else torch.bfloat16


def divided(values: Tensor, by: float) -> Tensor:
    """values / by in their float type, rounded once wherever they lie: on CUDA torch multiplies by a number's
    reciprocal, which has other bits."""
    return values / torch.full_like(values, by)


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales (float32) as they will be read back from a file that holds `dtype`; round codes against these.

    A scale that is or becomes 0 (a row or group of zeros) is the dtype's epsilon, as compressed-tensors writes it: a
    loader may divide by it. Raises ValueError where a scale overflows the dtype.
    """
    rounded = scale.to(dtype)
    rounded = torch.where(rounded == 0, torch.finfo(dtype).eps, rounded.float())
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"scales up to {float(scale.abs().max()):.3g} do not fit {dtype}; store them as bfloat16")
    return rounded


def as_stored(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` as `dtype`, which must hold them exactly: what is written is what was measured.

    Raises ValueError where it does not (`round_scale` before choosing the codes).
    """
    cast = values.to(dtype).contiguous()
    if not torch.equal(cast.to(values.dtype), values):
        raise ValueError(f"{name}: {dtype} cannot hold these values exactly; round them before the codes are chosen")
    return cast


def with_bias(tensors: dict[str, Tensor], packed: PackedWeight, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's tensors and, where it has one, its bias in the model's dtype. Raises ValueError as `as_stored`."""
    name = f"{prefix}.bias"
    return tensors if packed.bias is None else tensors | {name: as_stored(name, packed.bias, dtype)}


def tensor_bytes(tensors: Tensors) -> int:
    """Bytes of a layer's tensors in a file, all but the bias: codes, scales, tables and descriptions."""
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if not name.endswith(".bias"))


def read_bias(tensors: Tensors, prefix: str, outputs: int) -> Tensor | None:
    """The layer's bias (outputs,) as float32, or None where it has none."""
    name = f"{prefix}.bias"
    if name not in tensors:
        return None
    return check_finite(name, expect_shape(name, tensors[name], (outputs,))).float()


def group_width(inputs: int, group_size: int) -> int:
    """Inputs that share a scale: `group_size`, or all of them where that is 0. Raises ValueError for ragged groups."""
    width = group_size or inputs
    if width < 0 or inputs % width:
        raise ValueError(f"groups of {group_size} do not divide rows of {inputs} inputs; choose a size that does")
    return width


def spread(values: Tensor, packed: PackedWeight) -> Tensor:
    """(N, K) float32 weights from their codes' values: times scale, minus offset, inputs in their own order."""
    n, k = packed.shape
    width = group_width(k, packed.scheme.group_size)
    weight = values.view(n, -1, width) * packed.scale.unsqueeze(-1)
    if packed.offset is not None:
        weight = weight - packed.offset.unsqueeze(-1)
    return restore_order(weight.view(n, k), packed.perm)


def restore_order(weight: Tensor, perm: Tensor | None) -> Tensor:
    """(N, K) in the order of the inputs, where column j belongs to input perm[j]; itself where `perm` is None."""
    if perm is None:
        return weight
    ordered = torch.empty_like(weight)
    ordered[:, perm] = weight
    return ordered


def in_first(values: Tensor, *dtypes: torch.dtype) -> Tensor | None:
    """float32 values in the first of the dtypes that holds all of them exactly; None where none does."""
    return next((narrow for dtype in dtypes if torch.equal((narrow := values.to(dtype)).float(), values)), None)
