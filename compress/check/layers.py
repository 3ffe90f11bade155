"""The weights of a checkpoint by the names that a plain one gives them, however they are stored."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from compress.check.opening import Opened
from runtime import formats
from runtime.checkpoints.gguf.checkpoint import GgufTensors
from runtime.formats import mxfp4
from runtime.formats.packed import PackedWeight

# What stands in the place of "weight" where a layer is packed: each layout's own words.
_PARTS = re.compile(
    r"\.(?:qweight|qzeros|scales|g_idx"
    r"|weight_(?:packed|scale|scale_inv|shape|zero_point|g_idx|global_scale|tiles|levels|patterns|format)"
    r"|(?:input|output)_(?:scale|zero_point|global_scale)|SCB"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))$"
)
_MXFP4 = re.compile(r"_(?:blocks|scales)$")
# Scales of a cache of keys and values, which are no weights.
_CACHE = re.compile(r"\.[kvq]_(?:scale|zero_point)$|(?:^|\.)kv_cache\.")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
# Numbers of a matrix that are looked at together.
_CHUNK = 1 << 21

Stored = PackedWeight | Tensor


@dataclass(frozen=True)
class Sizes:
    """A weight's shape as a plain checkpoint has it, its stored bits a weight, and how it is stored, in words."""

    shape: tuple[int, ...]
    bits: float
    stored: str


def by_weight(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The plain name of every weight, and the tensors that it is stored as; scales of caches are left out."""
    found: dict[str, list[str]] = {}
    names = list(names)
    held = frozenset(names)
    for name in names:
        if _CACHE.search(name):
            continue
        if _MXFP4.search(name) and mxfp4.holds(held, _MXFP4.sub("", name)):
            plain = _MXFP4.sub("", name)
        else:
            plain = _PARTS.sub(".weight", name)
        found.setdefault(plain, []).append(name)
    return {name: tuple(stored) for name, stored in found.items()}


def is_packed(stored: Iterable[str]) -> bool:
    """Whether tensors of such names are a packed weight rather than a plain one."""
    return any(_PARTS.search(name) or _MXFP4.search(name) for name in stored)


def read(opened: Opened, name: str) -> Stored:
    """A weight as it is stored, codes one a byte. Raises runtime's UserError naming the tensor that is damaged."""
    if isinstance(opened.tensors, GgufTensors):
        return opened.tensors.weight(name)
    if name.endswith(".weight"):
        return formats.read(opened.quantization, opened.tensors, name.removesuffix(".weight"))
    return opened.tensors[name]


def sizes(opened: Opened, name: str, stored: Iterable[str], weight: Stored | None) -> Sizes:
    """What a weight takes; `weight` None: it could not be read."""
    if isinstance(opened.tensors, GgufTensors):
        entry = opened.tensors.entry(name)
        kinds = opened.tensors.kinds(name)
        bits = sum(kind.bytes * 8 / kind.weights for kind in kinds) / len(kinds)
        return Sizes(entry.shape, bits, " and ".join(dict.fromkeys(kind.name for kind in kinds)))
    entries = [opened.tensors.entry(part) for part in stored]
    held = sum(math.prod(entry.shape) * _BYTES.get(entry.dtype, 1) for entry in entries)
    if isinstance(weight, PackedWeight):
        return Sizes(weight.shape, 8 * held / math.prod(weight.shape), _words(weight))
    shape = tuple(weight.shape) if weight is not None else entries[0].shape
    kind = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(entries[0].dtype, entries[0].dtype)
    return Sizes(shape, 8 * held / max(math.prod(shape), 1), kind)


def _words(weight: PackedWeight) -> str:
    scheme = weight.scheme
    name = scheme.kind if scheme.kind in ("nf4", "fp8", "ternary", "ternary-1.25", "mxfp4") else f"int{scheme.bits}"
    name = f"trellis-{scheme.bits}" if scheme.kind == "trellis" else name
    size = f" in groups of {scheme.group_size}" if scheme.group_size else ""
    more = "" if weight.offset is None else ", zero points"
    return f"{name}{size}{more}{'' if weight.perm is None else ', activation order'}"


def kind_of(name: str) -> str:
    """The last part of the layer's name: "q_proj", "embed_tokens", "input_layernorm"."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def slices(rows: int, columns: int) -> Iterable[slice]:
    """The rows of a matrix, so many at once that a few copies of them stay in the caches' reach."""
    step = max(32, _CHUNK // max(columns, 1) // 32 * 32)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def take_rows(weight: PackedWeight, rows: slice | Tensor) -> PackedWeight:
    """Some of a packed weight's rows, without bias."""
    offset = None if weight.offset is None else weight.offset[rows]
    return replace(weight, codes=weight.codes[rows], scale=weight.scale[rows], offset=offset, bias=None, tiles=None)


def plain_rows(weight: Stored, rows: slice | Tensor) -> Tensor:
    """Rows of a weight as (rows, K) float32; a vector is one row."""
    if isinstance(weight, PackedWeight):
        return formats.dequantize(take_rows(weight, rows))
    return as_matrix(weight)[rows].float()


def as_matrix(weight: Tensor) -> Tensor:
    """A plain weight of any shape as a matrix over its last dimension; a vector is one row."""
    return weight.reshape(1, -1) if weight.ndim <= 1 else weight.flatten(0, -2)


def rows_of(weight: Stored) -> tuple[int, int]:
    """(rows, columns) as `plain_rows` counts them."""
    if isinstance(weight, PackedWeight):
        return weight.shape
    shape = as_matrix(weight).shape
    return shape[0], shape[1]


def layer_number(name: str) -> int | None:
    """The first number in a tensor's name: its block's."""
    found = re.search(r"\.(\d+)\.", f".{name}")
    return int(found[1]) if found else None


def experts(names: Iterable[str]) -> Mapping[tuple[str, str], dict[int, str]]:
    """The weights of a mixture's experts: (place of the mixture, name of the layer) -> expert -> weight's name."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.+)\.weight", name)
        if match:
            found.setdefault((match[1], match[3]), {})[int(match[2])] = name
    return found


def whole(weight: Stored) -> Tensor:
    """All of a weight, float32."""
    return formats.dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
