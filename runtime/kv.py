"""How keys and values are held: float32 or float16, or int8 or int4 with one scale per token and head.

Keys are divided by static per-channel factors (1 when uncalibrated), then rounded per token and head; values are
rounded per token and head. scale = absmax / 127 or absmax / 7; codes stay symmetric. Float32 arithmetic throughout.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from runtime.kernels.reference import KEY_BLOCK, quantize_rows
from runtime.kv_kind import FLOATS, CacheKind

# Codes lie within ± these.
LIMITS = {"int8": 127.0, "int4": 7.0}
# Head dimensions are stored in whole vectors of this many floats.
VECTOR = 16
# Bytes of a cache line, and of the widest load: stores begin at a multiple.
LINE = 64


@dataclass(frozen=True)
class Store:
    """Memory of keys and values, for all layers; `wide` is head_dim rounded up to 16.

    float32  keys (layers, blocks, kv_heads, head_dim, 64), values (layers, blocks, kv_heads, 64, wide).
    float16  the same, float16.
    int8     the same, int8.
    int4     uint8 nibbles: keys (…, head_dim, 32) with key j in the low and key j + 32 in the high half of a byte,
             values (…, 64, wide / 2) with dimension i beside i + wide / 2.
    scales   (layers, blocks, kv_heads, 64) float32 for the keys and for the values; empty for floats.
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
        return (
            self.keys.data_ptr(),
            self.values.data_ptr(),
            self.key_scale.data_ptr(),
            self.value_scale.data_ptr(),
            self.keys.shape[1],
            0 if self.table is None else self.table.data_ptr(),
        )

    @property
    def capacity(self) -> int:
        """Slots that the request may use."""
        return KEY_BLOCK * (self.keys.shape[1] if self.table is None else len(self.table))

    def first(self, blocks: int) -> slice | Tensor:
        """Where the request's first `blocks` blocks lie."""
        return slice(0, blocks) if self.table is None else self.table[:blocks]

    def physical(self, slots: Tensor) -> Tensor:
        """Where some of the request's slots (n,) lie in the memory; int64 on the CPU."""
        return slots if self.table is None else self.table[slots // KEY_BLOCK] * KEY_BLOCK + slots % KEY_BLOCK


def allocate(kind: CacheKind, layers: int, blocks: int, kv_heads: int, head_dim: int, device: torch.device) -> Store:
    """A store of zeros. Raises RuntimeError, ValueError or MemoryError where the machine has no such memory."""
    lead = (layers, blocks, kv_heads)
    wide = -(-head_dim // VECTOR) * VECTOR
    dtype, keys, values = {
        "float32": (torch.float32, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "float16": (torch.float16, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "int8": (torch.int8, (head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
        "int4": (torch.uint8, (head_dim, KEY_BLOCK // 2), (KEY_BLOCK, wide // 2)),
    }[kind]
    scales = (0,) if kind in FLOATS else (*lead, KEY_BLOCK)
    shapes = (((*lead, *keys), dtype), ((*lead, *values), dtype), (scales, torch.float32), (scales, torch.float32))
    return Store(*(_zeros(shape, kind, device) for shape, kind in shapes))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
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


@dataclass(frozen=True)
class Quantizer:
    """Reads and writes a `Store` at blocks and slots of the memory. key_factor (layers, kv_heads, head_dim) or None."""

    kind: CacheKind
    key_factor: Tensor | None = None

    def write(self, store: Store, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, kv_heads, head_dim) float32 at n slots. float16 beyond ±65504 are infinities."""
        block, inside = slots // KEY_BLOCK, slots % KEY_BLOCK
        dim = keys.shape[-1]
        if self.kind not in FLOATS:
            if self.key_factor is not None:
                keys = keys / self.key_factor[layer]
            limit = LIMITS[self.kind]
            keys, store.key_scale[layer, block, :, inside] = quantize_rows(keys, limit)
            values, store.value_scale[layer, block, :, inside] = quantize_rows(values, limit)
        if self.kind != "int4":
            store.keys[layer, block, :, :, inside] = keys.to(store.keys.dtype)
            store.values[layer, block, :, inside, :dim] = values.to(store.values.dtype)
            return
        blocks, block = block.unique(return_inverse=True)
        held_keys, held_values = _nibbles(store.keys[layer, blocks]), _nibbles(store.values[layer, blocks])
        held_keys[block, :, :, inside] = keys
        held_values[block, :, inside, :dim] = values
        store.keys[layer, blocks], store.values[layer, blocks] = _bytes(held_keys), _bytes(held_values)

    def read(self, store: Store, layer: int, blocks: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Float32 keys (blocks, kv_heads, head_dim, 64) and values (blocks, kv_heads, 64, wide) of some blocks."""
        keys, values = store.keys[layer, blocks], store.values[layer, blocks]
        if self.kind in FLOATS:
            return keys.float(), values.float()
        if self.kind == "int4":
            keys, values = _nibbles(keys), _nibbles(values)
        keys = keys.float() * store.key_scale[layer, blocks].unsqueeze(-2)
        if self.key_factor is not None:
            keys = keys * self.key_factor[layer].unsqueeze(-1)
        return keys, values.float() * store.value_scale[layer, blocks].unsqueeze(-1)

    def move(self, store: Store, source: Tensor, target: Tensor) -> None:
        """Copies slots in all layers; what is read is read before anything is written."""
        a, i, b, j = source // KEY_BLOCK, source % KEY_BLOCK, target // KEY_BLOCK, target % KEY_BLOCK
        if self.kind not in FLOATS:
            for scale in (store.key_scale, store.value_scale):
                scale[:, b, :, j] = scale[:, a, :, i]
        if self.kind != "int4":
            store.keys[:, b, :, :, j] = store.keys[:, a, :, :, i]
            store.values[:, b, :, j] = store.values[:, a, :, i]
            return
        blocks, places = torch.cat((a, b)).unique(return_inverse=True)
        a, b = places.chunk(2)
        keys, values = _nibbles(store.keys[:, blocks]), _nibbles(store.values[:, blocks])
        keys[:, b, :, :, j] = keys[:, a, :, :, i]
        values[:, b, :, j] = values[:, a, :, i]
        store.keys[:, blocks], store.values[:, blocks] = _bytes(keys), _bytes(values)


def _nibbles(packed: Tensor) -> Tensor:
    """(…, n) bytes to (…, 2n) codes −8..7: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8


def _bytes(codes: Tensor) -> Tensor:
    """The inverse of `_nibbles`."""
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4
