"""How keys and values are held: float32, or int8 or int4 with one scale per token and head.

Keys are divided by static per-channel factors (1 when uncalibrated), then rounded per token and head; values are
rounded per token and head. scale = absmax / 127 or absmax / 7; codes stay symmetric. Float32 arithmetic throughout.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from runtime.kernels.reference import KEY_BLOCK, quantize_rows

CacheKind = Literal["float32", "int8", "int4"]
_LIMITS = {"int8": 127.0, "int4": 7.0}
# Head dimensions are stored in whole vectors of this many floats.
VECTOR = 16


@dataclass(frozen=True)
class Store:
    """One request's memory, for all layers; `wide` is head_dim rounded up to 16.

    float32  keys (layers, blocks, kv_heads, head_dim, 64), values (layers, blocks, kv_heads, 64, wide).
    int8     the same, int8.
    int4     uint8 nibbles: keys (…, head_dim, 32) with key j in the low and key j + 32 in the high half of a byte,
             values (…, 64, wide / 2) with dimension i beside i + wide / 2.
    scales   (layers, blocks, kv_heads, 64) float32 for the keys and for the values; empty for float32.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @cached_property
    def pointers(self) -> tuple[int, int, int, int, int]:
        """Addresses of the four, and the number of blocks."""
        return (
            self.keys.data_ptr(),
            self.values.data_ptr(),
            self.key_scale.data_ptr(),
            self.value_scale.data_ptr(),
            self.keys.shape[1],
        )


@dataclass(frozen=True)
class Quantizer:
    """Reads and writes a `Store`. key_factor (layers, kv_heads, head_dim) or None."""

    kind: CacheKind
    key_factor: Tensor | None = None

    def write(self, store: Store, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, kv_heads, head_dim) float32 at n slots."""
        block, inside = slots // KEY_BLOCK, slots % KEY_BLOCK
        dim = keys.shape[-1]
        if self.kind == "float32":
            store.keys[layer, block, :, :, inside] = keys
            store.values[layer, block, :, inside, :dim] = values
            return
        if self.key_factor is not None:
            keys = keys / self.key_factor[layer]
        limit = _LIMITS[self.kind]
        key_codes, key_scale = quantize_rows(keys, limit)
        value_codes, value_scale = quantize_rows(values, limit)
        store.key_scale[layer, block, :, inside] = key_scale
        store.value_scale[layer, block, :, inside] = value_scale
        blocks = _span(block)
        held_keys, held_values = _codes(store, layer, blocks)
        block = block - blocks.start
        held_keys[block, :, :, inside] = key_codes
        held_values[block, :, inside, :dim] = value_codes
        _put(store, layer, blocks, held_keys, held_values)

    def read(self, store: Store, layer: int, blocks: slice) -> tuple[Tensor, Tensor]:
        """Float32 keys (blocks, kv_heads, head_dim, 64) and values (blocks, kv_heads, 64, wide) of some blocks."""
        if self.kind == "float32":
            return store.keys[layer, blocks], store.values[layer, blocks]
        key_codes, value_codes = _codes(store, layer, blocks)
        keys = key_codes.float() * store.key_scale[layer, blocks].unsqueeze(-2)
        if self.key_factor is not None:
            keys = keys * self.key_factor[layer].unsqueeze(-1)
        return keys, value_codes.float() * store.value_scale[layer, blocks].unsqueeze(-1)

    def move(self, store: Store, source: Tensor, target: Tensor) -> None:
        """Copies slots in all layers; what is read is read before anything is written."""
        a, i, b, j = source // KEY_BLOCK, source % KEY_BLOCK, target // KEY_BLOCK, target % KEY_BLOCK
        if self.kind == "float32":
            store.keys[:, b, :, :, j] = store.keys[:, a, :, :, i]
            store.values[:, b, :, j] = store.values[:, a, :, i]
            return
        for scale in (store.key_scale, store.value_scale):
            scale[:, b, :, j] = scale[:, a, :, i]
        blocks = _span(torch.cat((a, b)))
        a, b = a - blocks.start, b - blocks.start
        for layer in range(store.keys.shape[0]):
            keys, values = _codes(store, layer, blocks)
            keys[b, :, :, j] = keys[a, :, :, i]
            values[b, :, j] = values[a, :, i]
            _put(store, layer, blocks, keys, values)


def _codes(store: Store, layer: int, blocks: slice) -> tuple[Tensor, Tensor]:
    """int8 codes of some blocks, keys (…, head_dim, 64) and values (…, 64, wide); int8 ones are the store's own."""
    keys, values = store.keys[layer, blocks], store.values[layer, blocks]
    if keys.dtype == torch.int8:
        return keys, values
    return _nibbles(keys), _nibbles(values)


def _nibbles(packed: Tensor) -> Tensor:
    """(…, n) bytes to (…, 2n) codes −8..7: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8


def _span(blocks: Tensor) -> slice:
    """The blocks from the first to the last of some; none of none."""
    return slice(int(blocks.min()), int(blocks.max()) + 1) if len(blocks) else slice(0, 0)


def _put(store: Store, layer: int, blocks: slice, keys: Tensor, values: Tensor) -> None:
    if store.keys.dtype == torch.int8:
        return  # `_codes` gave the memory itself
    for held, codes in ((store.keys, keys), (store.values, values)):
        low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
        held[layer, blocks] = low | high << 4
