"""Weights as GGUF blocks. Codes go over as they are wherever a block type has their grid:

    int4 (3, 2 bits), groups of n · 32   Q4_0, or Q4_1 with offsets: the scale is repeated for every 32 inputs
    int8 rows, int6 (5), groups of n·32  Q8_0
    ternary                              TQ2_0; Q4_0 where 256 does not divide a row
    mxfp4                                MXFP4
    floats                               F32, F16, BF16

Blocks have float16 scales (and minima), so scales of another type may be rounded once. What has no such grid (nf4,
inputs in activation order, int8 with offsets, smaller groups) is rounded again to Q8_0, or where 32 does not divide a
row kept as F32. The layouts are those of ggml-quants.c (github.com/ggml-org/llama.cpp).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.errors import UserError
from runtime.checkpoints.gguf.blocks import unpack
from runtime.checkpoints.gguf.reader import BF16, F16, F32, MXFP4, Q4_0, Q4_1, Q8_0, TQ2_0, BlockType
from runtime.formats import dequantize
from runtime.formats.mxfp4 import LEVELS
from runtime.formats.packed import PackedWeight

Bytes = NDArray[np.uint8]
_PLAIN = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}


def choose(weight: PackedWeight | Tensor) -> BlockType:
    """The type that holds a weight (N, K), by its scheme and shape alone."""
    if isinstance(weight, Tensor):
        return _PLAIN.get(weight.dtype, F32)
    return F32 if weight.shape[1] % Q8_0.weights else _with_its_grid(weight) or Q8_0


def _with_its_grid(weight: PackedWeight) -> BlockType | None:
    """The type whose blocks take the weight's own codes; None where none has its grid."""
    kind, size = weight.scheme.kind, weight.scheme.group_size or weight.shape[1]
    if weight.perm is not None or size % Q8_0.weights:
        return None
    if kind == "mxfp4":
        return MXFP4
    if kind == "ternary":
        return Q4_0 if size % TQ2_0.weights else TQ2_0
    if kind == "int4":
        return Q4_0 if weight.offset is None else Q4_1
    return Q8_0 if kind in ("int8", "int6") and weight.offset is None else None


def pack(name: str, weight: PackedWeight | Tensor, kind: BlockType) -> Bytes:
    """The rows (N, bytes of a row) of a weight as `kind`, which `choose` gave, or a plain type.

    Raises UserError naming the tensor where float16 cannot hold its scales.
    """
    if kind.plain or isinstance(weight, Tensor) or _with_its_grid(weight) != kind:
        from gguf import GGMLQuantizationType, quants

        values = weight if isinstance(weight, Tensor) else dequantize(weight)
        rounded = quants.quantize(values.float().numpy(), GGMLQuantizationType(kind.number))
        return np.ascontiguousarray(rounded).view(np.uint8).reshape(len(values), -1)
    codes, scale = weight.codes.numpy(), _per_block(weight, weight.scale, kind)
    n = codes.shape[0]
    blocks = codes.view(np.uint8).reshape(n, -1, kind.weights)
    if kind == MXFP4:
        exponents = (torch.frexp(weight.scale).exponent + 126).to(torch.uint8).numpy()
        return _joined(exponents[..., None], _merged(blocks.reshape(n, -1, 2, 16), 4))
    if kind == Q8_0:
        return _joined(_half(name, scale), blocks)
    if kind == TQ2_0:
        fields = (blocks + np.uint8(1)).reshape(n, -1, 2, 4, 32)
        return _joined(_merged(fields, 2).reshape(n, -1, 64), _half(name, scale))
    # Codes of four bits may count from −8 or, with offsets, from 0.
    shift = 0 if weight.offset is not None and int(codes.min(initial=0)) >= 0 else 8
    body = _merged((blocks + np.uint8(shift)).reshape(n, -1, 2, 16), 4)
    if weight.offset is None:
        return _joined(_half(name, scale), body)
    least = -(_per_block(weight, weight.offset, kind) + shift * scale)
    return _joined(_half(name, scale), _half(name, least), body)


def _merged(fields: Bytes, bits: int) -> Bytes:
    """(…, f, w) fields of `bits` bits as (…, w) bytes, the first field lowest."""
    merged = fields[..., 0, :].copy()
    for index in range(1, fields.shape[-2]):
        merged |= fields[..., index, :] << np.uint8(bits * index)
    return merged


def _joined(*parts: Bytes) -> Bytes:
    """Parts of blocks, (N, blocks, …), as rows."""
    return np.concatenate(parts, axis=-1).reshape(parts[0].shape[0], -1)


def _per_block(weight: PackedWeight, values: Tensor, kind: BlockType) -> NDArray[np.float32]:
    """(N, G) as (N, blocks): each group is whole blocks."""
    groups = weight.shape[1] // kind.weights // values.shape[1]
    return values.numpy().repeat(groups, axis=1)


def _half(name: str, values: NDArray[np.float32]) -> Bytes:
    """(N, blocks) as (N, blocks, 2) bytes of float16."""
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(values.astype("<f2"))
    if not bool(np.isfinite(half).all()):
        raise UserError(
            f"{name}: GGUF's blocks have float16 scales, and this layer's go up to {float(np.abs(values).max()):.3g}:"
            " leave the layer out of the recipe"
        )
    return half.view(np.uint8).reshape(*values.shape, 2)


def read_back(rows: Bytes, kind: BlockType) -> NDArray[np.float32]:
    """(N, K) float32: what a reader makes of rows of bytes."""
    if kind.plain:
        from gguf import GGMLQuantizationType, quants

        plain: NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType(kind.number))
        return plain
    groups = unpack(kind, rows)
    n, count = groups.scale.shape
    if kind == MXFP4:
        return (LEVELS.numpy()[groups.codes].reshape(n, count, -1) * groups.scale[..., None]).reshape(n, -1)
    values_of = groups.codes.reshape(n, count, -1) * groups.scale[..., None]
    if groups.offset is not None:
        values_of = values_of - groups.offset[..., None]
    return values_of.reshape(n, -1)


def loss(weight: PackedWeight | Tensor, rows: Bytes, kind: BlockType) -> float:
    """‖W' − W‖ / ‖W‖ of what was written; 0.0 where it is exactly the weight."""
    values = (weight.float() if isinstance(weight, Tensor) else dequantize(weight)).numpy()
    found = read_back(rows, kind)
    if np.array_equal(values, found):
        return 0.0
    size = float(np.linalg.norm(values.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - values)) / size if size else float("inf")
