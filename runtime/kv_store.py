"""How keys and values lie in memory, in blocks of 64 tokens: float32 or float16, or int8, int4 or int3 with one scale
per token and head.

Keys are divided by static per-channel factors (1 when uncalibrated), then rounded per token and head; values are
rounded per token and head. scale = absmax / 127 or absmax / 7; codes stay symmetric. In a basis of their head
(kernels/basis.py), and in three bits, scales have a sign instead and all codes are used. Float32 arithmetic throughout.

In a basis codes beyond a knee count double: few rows of a head reach them, and the others have finer steps for it. The
first 20 dimensions have a bit more. A scale keeps its sign, its exponent and three bits of its fraction;
bit i of the 20 below says that dimension i's code is a half more than what is stored of it. So codes times scales, and
their sums with halves, are exact in float32, whatever the order.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from runtime.contract import FLOATS, CacheKind

# Codes of quantised keys and values lie within ± these.
LIMITS = {"int8": 127.0, "int4": 7.0}
# Of rows with signed scales: what a row's extreme is of its scale (a little beyond the last code: the others gain more
# than it loses), and the number of codes below 0.
SIGNED = {"int3": (-4.25, 4)}


@dataclass(frozen=True)
class Levels:
    """What rows in a basis are rounded to: code c stands for c + (c − c within ± knee) of the scale.

    limit  what a row's extreme is of its scale, before others are tried; half: the number of codes below 0.
    """

    limit: float
    half: int
    knee: float


IN_BASIS = {"int4": Levels(-10.0, 8, 5.5), "int3": Levels(-5.25, 4, 2.5)}
# Dimensions of a basis whose codes have halves, and what of a scale's 32 bits is the scale then.
HALVES = 20
SCALE_BITS = -1 << HALVES
# Bytes of sixteen codes of three bits: four with the lower two bits of each, two with the upper ones.
THREE_BITS = 6
# Head dimensions are stored in whole vectors of this many floats.
VECTOR = 16
# Bytes of a cache line, and of the widest load: stores begin at a multiple.
LINE = 64
# Keys of a block.
KEY_BLOCK = 64
# Positions whose attention weights share a maximum. Sums go split by split, so their order is that of the position.
SPLIT = 512


@dataclass(frozen=True, eq=False)
class Store:
    """Memory of keys and values, for all layers; `wide` is a value's dimensions rounded up to 16.

    float32  keys (layers, blocks, kv_heads, head_dim, 64), values (layers, blocks, kv_heads, 64, wide).
    float16  the same, float16.
    int8     the same, int8.
    int4     uint8 nibbles: keys (…, head_dim, 32) with key j in the low and key j + 32 in the high half of a byte,
             values (…, 64, wide / 2) with dimension i beside i + wide / 2.
    int3     uint8, sixteen codes in six bytes: keys (…, head_dim, 24), values (…, 64, wide / 16 · 6).
    scales   (layers, blocks, kv_heads, 64) float32 for the keys and for the values, in a basis with bits of codes in
             them (`with_halves`); empty for floats.
    table    (request's blocks,) int64 on the CPU: where each of a request's blocks lies among `blocks`, which are a
             pool of pages then; −1: nowhere yet. None: the request's blocks are the memory's.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor
    table: Tensor | None = None

    @cached_property
    def pointers(self) -> tuple[int, int, int, int, int, int]:
        """Addresses of the four, the number of blocks, and the table's address (0: none)."""
        keys, values, key_scale, value_scale = (part.data_ptr() for part in self.parts)
        table = 0 if self.table is None else self.table.data_ptr()
        return keys, values, key_scale, value_scale, self.keys.shape[1], table

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What has a second dimension of blocks: keys, values and (empty for floats) their scales."""
        return self.keys, self.values, self.key_scale, self.value_scale

    @cached_property
    def capacity(self) -> int:
        """Slots that the request may use."""
        return KEY_BLOCK * (self.keys.shape[1] if self.table is None else len(self.table))

    def first(self, blocks: int) -> slice | Tensor:
        """Where the request's first `blocks` blocks lie."""
        return slice(0, blocks) if self.table is None else self.table[:blocks]

    def physical(self, slots: Tensor) -> Tensor:
        """Where some of the request's slots (n,) lie in the memory; int64 on the CPU."""
        return slots if self.table is None else self.table[slots // KEY_BLOCK] * KEY_BLOCK + slots % KEY_BLOCK


def scale_of(scales: Tensor) -> Tensor:
    """Scales (…,) float32 without the bits of codes in them."""
    return (scales.view(torch.int32) & SCALE_BITS).view(torch.float32)


def with_halves(scales: Tensor, halves: Tensor) -> Tensor:
    """Short scales (…,) float32 with the halves (…, n) bool of their codes in them, n ≤ 20."""
    places = torch.arange(halves.shape[-1], dtype=torch.int32, device=scales.device)
    return (scales.view(torch.int32) | (halves.int() << places).sum(-1, dtype=torch.int32)).view(torch.float32)


def halves_of(scales: Tensor, dim: int) -> Tensor:
    """(…, dim) float32, 0 or 0.5: what codes of `dim` dimensions are more than is stored of them."""
    places = torch.arange(min(dim, HALVES), dtype=torch.int32, device=scales.device)
    found = (scales.view(torch.int32)[..., None] >> places & 1).float() / 2
    return torch.nn.functional.pad(found, (0, dim - len(places)))


def allocate(
    kind: CacheKind, layers: int, blocks: int, kv_heads: int, head_dim: int, device: torch.device, value_dim: int = 0
) -> Store:
    """A store of zeros, of values of `value_dim` dimensions (0: as many as keys have).

    Raises RuntimeError, ValueError or MemoryError where the machine has no such memory.
    """
    lead = (layers, blocks, kv_heads)
    wide = -(-(value_dim or head_dim) // VECTOR) * VECTOR
    dtype, keys, values = {
        "float32": (torch.float32, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "float16": (torch.float16, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "int8": (torch.int8, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "int4": (torch.uint8, (head_dim, KEY_BLOCK // 2), (KEY_BLOCK, wide // 2)),
        "int3": (
            torch.uint8,
            (head_dim, KEY_BLOCK // VECTOR * THREE_BITS),
            (KEY_BLOCK, wide // VECTOR * THREE_BITS),
        ),
    }[kind]
    scales = (0,) if kind in FLOATS else (*lead, KEY_BLOCK)
    shapes = (((*lead, *keys), dtype), ((*lead, *values), dtype), (scales, torch.float32), (scales, torch.float32))
    return Store(*(zeros(shape, kind, device) for shape, kind in shapes))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory when they are first written.

    On a CPU not torch's: they would be filled by all of its threads, which then spin for milliseconds on the cores that
    the kernels' threads need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
