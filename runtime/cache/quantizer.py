"""Keys and values in and out of a store, rounded to int8 or int4 per token and head where the cache is quantised."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.contract import FLOATS, CacheKind
from runtime.kernels.reference import quantize_rows
from runtime.kv_store import KEY_BLOCK, LIMITS, Store


@dataclass(frozen=True, eq=False)
class CacheFormat:
    """What a cache holds of each token in layers of one shape, and how. Reads and writes a `Store` at blocks and slots
    of the memory.

    key_factor  (layers, kv_heads, head_dim) float32 or None: keys are divided by it before they are rounded.
    value_dim   dimensions of values; 0: as many as of keys.
    state       floats of the states of all layers that have one (cache/states.py); of a cache with layers of several
                shapes it is the first format's.

    Raises ValueError for a factor of another shape or with entries that are not positive.
    """

    layers: int
    kv_heads: int
    head_dim: int
    device: torch.device
    kind: CacheKind = "float32"
    key_factor: Tensor | None = None
    value_dim: int = 0
    state: int = 0

    def __post_init__(self) -> None:
        factor, shape = self.key_factor, (self.layers, self.kv_heads, self.head_dim)
        if factor is not None:
            found, least = factor.shape, float(factor.min())
            if tuple(found) != shape or not 0 < least <= float(factor.max()) < float("inf"):
                raise ValueError(f"key_factor must be {shape} and positive, found {list(found)} from {least}")

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and their scales over all layers (what pads a head to whole vectors left out)."""
        each = {"float32": (4.0, 0), "float16": (2.0, 0), "int8": (1.0, 4), "int4": (0.5, 4)}
        size, scale = each[self.kind]
        per_head = sum(math.ceil(size * dim) + scale for dim in (self.head_dim, self.values))
        return self.layers * self.kv_heads * per_head

    @property
    def values(self) -> int:
        """Dimensions of values."""
        return self.value_dim or self.head_dim

    def write(self, store: Store, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys (n, kv_heads, head_dim) and values float32 at n slots. float16 beyond ±65504 are infinities."""
        block, inside = slots // KEY_BLOCK, slots % KEY_BLOCK
        dim = values.shape[-1]
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
