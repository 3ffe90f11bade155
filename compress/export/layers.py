"""The layers of a finished model as exporters need to know them before they write the first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import torch

from compress.errors import UserError
from compress.export import prefixes, told
from compress.quantize import grid
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize, int8, three_of_four, trellis
from runtime.formats.codes import whole_zeros
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.schemes import KINDS
from runtime.formats.tensors import in_first


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
    if in_first(packed.scale, *dtypes) is not None:
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


def weight_of(checkpoint: Checkpoint, prefix: str) -> PackedWeight | torch.Tensor:
    """A layer's weight as exports take it: a trellis as the int8 rows that it exactly is, ternary-1.25 as ternary."""
    weight = checkpoint.weight(prefix)
    if not isinstance(weight, PackedWeight):
        return weight
    kind = KINDS[weight.scheme.kind]
    if kind.has_fours:
        return three_of_four.as_ternary(weight)
    return trellis.as_int8(weight) if kind.has_tiles else weight


# Caches' static scales, which only compressed-tensors' loaders know.
CACHE_SCALES = (".k_scale", ".v_scale")
NOTHING_PACKED = "expected packed weights, found plain ones only: compress with a recipe that quantises"
# Smaller groups take more for their scales than for their codes.
LEAST_GROUP = 8
_USUAL_GROUPS = (-1, 16, 32, 64, 128)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Facts:
    """A packed layer, without its codes.

    shape      (outputs N, inputs K).
    reordered  whether its inputs are in activation order.
    zeros      lowest and highest zero point, counted as the codes are; None where they are no whole numbers.
    static     whether its inputs have a static step.
    """

    prefix: str
    scheme: Scheme
    shape: tuple[int, int]
    reordered: bool
    zeros: tuple[int, int] | None
    static: bool

    @property
    def is_head(self) -> bool:
        """Whether it is the model's head, which loaders leave as it is or treat as a case of its own."""
        return self.prefix in ("lm_head", "embed_out")

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.scheme.group_size or self.shape[1]


@dataclass(frozen=True)
class Model:
    """A checkpoint, what is packed in it by name, and the linear modules that config.json says are not."""

    checkpoint: Checkpoint
    packed: tuple[Facts, ...]
    skipped: tuple[str, ...]

    @property
    def method(self) -> str | None:
        """Whose format its weights are in."""
        quantization = self.checkpoint.quantization
        return None if quantization is None else str(quantization.get("quant_method", "bitsandbytes"))

    @property
    def dtype(self) -> torch.dtype:
        """The type that its plain weights are meant to have."""
        config = self.checkpoint.config
        return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


def survey(path: Path) -> Model:
    """Opens a model and looks at every packed layer. Raises UserError where none is packed, or one cannot be read."""
    checkpoint = open_checkpoint(path)
    found = prefixes(checkpoint.names())
    if not found:
        raise UserError(f"{checkpoint.path.name}: {NOTHING_PACKED}")
    return Model(checkpoint, tuple(_facts(checkpoint, prefix) for prefix in found), _skipped(checkpoint))


def _facts(checkpoint: Checkpoint, prefix: str) -> Facts:
    weight = weight_of(checkpoint, prefix)
    if not isinstance(weight, PackedWeight):
        raise UserError(
            f"{checkpoint.path.name}: expected packed weights in {prefix}, which has scales, found plain ones: the"
            " checkpoint is damaged, so write it again"
        )
    zeros = whole_zeros(weight)
    return Facts(
        prefix,
        weight.scheme,
        weight.shape,
        weight.perm is not None,
        None if zeros is None else (int(zeros.min()), int(zeros.max())),
        weight.input_scale is not None,
    )


def _skipped(checkpoint: Checkpoint) -> tuple[str, ...]:
    quantization = checkpoint.quantization or {}
    for key in ("ignore", "llm_int8_skip_modules", "modules_to_not_convert"):
        if isinstance(names := quantization.get(key), list):
            return tuple(str(name) for name in names)
    # GPTQ names none by name: every matrix that is plain. An embedding among them does no harm, a loader packs none.
    packed = set(prefixes(checkpoint.names()))
    plain = [name.removesuffix(".weight") for name in checkpoint.names() if name.endswith(".weight")]
    found = [name for name in plain if len(checkpoint.shape(f"{name}.weight")) == 2 and name not in packed]
    return tuple(dict.fromkeys([*([] if "lm_head" in packed else ["lm_head"]), *found]))


def common_group(layers: Sequence[Facts]) -> int:
    """The largest group size that all layers can be cut into without changing a weight; −1: each has one per row."""
    if all(layer.group == layer.shape[1] for layer in layers):
        return -1
    return gcd(*(layer.group for layer in layers))


def check_group(form: str, layers: Sequence[Facts], size: int) -> None:
    """Raises UserError where the groups that layers have in common are too small for any engine."""
    if size != -1 and size < LEAST_GROUP:
        shown = ", ".join(map(str, sorted({layer.group for layer in layers})))
        raise UserError(
            f"export {form}: the layers' groups of {shown} inputs have only parts of {size} in common: export"
            " compressed-tensors, which takes one size per layer"
        )


def group_notes(layers: Sequence[Facts], size: int) -> tuple[str, ...]:
    """What a user has to know of a group size that is not all layers' own, or not what kernels are made for."""
    return told(
        size != -1
        and len({layer.group for layer in layers}) > 1
        and f"Layers had groups of several sizes: all are cut into groups of {size}, which changes no weight.",
        size not in _USUAL_GROUPS
        and f"Groups of {size} inputs are read by plain kernels only: fast ones take 32, 64 and 128.",
    )
