"""Keys and values in and out of a store, rounded per token and head where the cache is quantised."""

import math
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoints.record import StateShape
from runtime.contract import FLOATS, CacheBasis, CacheKind, StateKind
from runtime.kernels.basis import level, round_in_basis, round_signed
from runtime.kernels.reference import quantize_rows
from runtime.kv_store import IN_BASIS, KEY_BLOCK, LIMITS, SIGNED, THREE_BITS, VECTOR, Store, halves_of, scale_of
from runtime.native.binding import CACHES, library
from runtime.native.structs import HeadsStruct, StoreStruct

# Kinds whose keys and values native code moves.
_MOVED = ("float32", "int8")
STATE_DTYPES: dict[StateKind, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, eq=False)
class CacheFormat:
    """What a cache holds of each token in layers of one shape, and how. Reads and writes a `Store` at blocks and slots
    of the memory.

    key_factor  (layers, kv_heads, head_dim) float32 or None: keys are divided by it before they are rounded.
    value_dim   dimensions of values; 0: as many as of keys.
    state       floats of the states of all layers that have one (cache/states.py); of a cache with layers of several
                shapes it is the first format's.
    state_kind  what these floats are held in: as they are, as the nearest halves, or matrices in int8.
    state_shapes  of each layer; int8 needs them.
    basis       what keys and values are written in, in place of factors; None: as they are.

    Raises ValueError for a factor of another shape or with entries that are not positive, and for a basis of another
    shape, beside a factor, or of a kind that has no use for one.
    """

    layers: int
    kv_heads: int
    head_dim: int
    device: torch.device
    kind: CacheKind = "float32"
    key_factor: Tensor | None = None
    value_dim: int = 0
    state: int = 0
    basis: CacheBasis | None = None
    state_kind: StateKind = "float32"
    state_shapes: tuple[StateShape, ...] = ()

    def __post_init__(self) -> None:
        factor, shape = self.key_factor, (self.layers, self.kv_heads, self.head_dim)
        if factor is not None:
            found, least = factor.shape, float(factor.min())
            if tuple(found) != shape or not 0 < least <= float(factor.max()) < float("inf"):
                raise ValueError(f"key_factor must be {shape} and positive, found {list(found)} from {least}")
        if self.basis is None:
            return
        lead = shape[:2]
        expected = [(*lead, 3, dim, dim) for dim in (self.head_dim, self.values)]
        found_shapes = [tuple(part.shape) for part in (self.basis.keys, self.basis.values)]
        if found_shapes != expected or factor is not None or self.kind not in IN_BASIS:
            raise ValueError(
                f"a basis is {expected} in caches of {', '.join(IN_BASIS)} without factors, found {found_shapes}"
            )

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and their scales over all layers (what pads a head to whole vectors left out)."""
        each = {"float32": (4.0, 0), "float16": (2.0, 0), "int8": (1.0, 4), "int4": (0.5, 4), "int3": (0.375, 4)}
        size, scale = each[self.kind]
        per_head = sum(math.ceil(size * dim) + scale for dim in (self.head_dim, self.values))
        return self.layers * self.kv_heads * per_head

    @property
    def states(self) -> StateKind | None:
        """What states are held in; None where there are none."""
        return self.state_kind if self.state else None

    @property
    def state_dtype(self) -> torch.dtype:
        """Of `state_kind`."""
        return STATE_DTYPES[self.state_kind]

    @property
    def state_width(self) -> int:
        """Elements of `state_dtype` that a token's state takes."""
        return self.state if self.state_kind != "int8" else sum(shape.bytes for shape in self.state_shapes)

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
            own = (None, None) if self.basis is None else (self.basis.keys[layer], self.basis.values[layer])
            keys, store.key_scale[layer, block, :, inside] = self._rounded(keys, own[0])
            values, store.value_scale[layer, block, :, inside] = self._rounded(values, own[1])
        if self.kind not in PACKINGS:
            store.keys[layer, block, :, :, inside] = keys.to(store.keys.dtype)
            store.values[layer, block, :, inside, :dim] = values.to(store.values.dtype)
            return
        unpacked, packed = PACKINGS[self.kind]
        blocks, block = block.unique(return_inverse=True)
        held_keys, held_values = unpacked(store.keys[layer, blocks]), unpacked(store.values[layer, blocks])
        held_keys[block, :, :, inside] = keys
        held_values[block, :, inside, :dim] = values
        store.keys[layer, blocks], store.values[layer, blocks] = packed(held_keys), packed(held_values)

    def read(self, store: Store, layer: int, blocks: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Float32 keys (blocks, kv_heads, head_dim, 64) and values (blocks, kv_heads, 64, wide) of some blocks, in the
        basis where there is one."""
        keys, values = store.keys[layer, blocks], store.values[layer, blocks]
        if self.kind in FLOATS:
            return keys.float(), values.float()
        if self.kind in PACKINGS:
            unpacked, _ = PACKINGS[self.kind]
            keys, values = unpacked(keys), unpacked(values)
        keys, values = keys.float(), values.float()
        key_scale, value_scale = store.key_scale[layer, blocks], store.value_scale[layer, blocks]
        if self.basis is not None:
            knee = IN_BASIS[self.kind].knee
            keys = level(keys + halves_of(key_scale, self.head_dim).transpose(-1, -2), knee)
            values = level(values + halves_of(value_scale, values.shape[-1]), knee)
            key_scale, value_scale = scale_of(key_scale), scale_of(value_scale)
        keys = keys * key_scale.unsqueeze(-2)
        if self.key_factor is not None:
            keys = keys * self.key_factor[layer].unsqueeze(-1)
        return keys, values * value_scale.unsqueeze(-1)

    def move(self, store: Store, source: Tensor, target: Tensor) -> None:
        """Copies slots (n,), int64 on the CPU, in all layers; what is read is read before anything is written."""
        native = library()[0] if self.kind in _MOVED and self.device.type == "cpu" else None
        if native is not None:
            # Half a dozen tensors of indices otherwise, each of which takes as long as the copies.
            heads = HeadsStruct(0, self.kv_heads, self.head_dim, 0, CACHES[self.kind], value_dim=self.value_dim)
            slots = source.contiguous(), target.contiguous()
            native.specpress_move(
                *(byref(heads), self.layers, byref(StoreStruct(*store.pointers)), len(source)),
                *(part.data_ptr() for part in slots),
            )
            return
        a, i, b, j = source // KEY_BLOCK, source % KEY_BLOCK, target // KEY_BLOCK, target % KEY_BLOCK
        if self.kind not in FLOATS:
            for scale in (store.key_scale, store.value_scale):
                scale[:, b, :, j] = scale[:, a, :, i]
        if self.kind not in PACKINGS:
            store.keys[:, b, :, :, j] = store.keys[:, a, :, :, i]
            store.values[:, b, :, j] = store.values[:, a, :, i]
            return
        unpacked, packed = PACKINGS[self.kind]
        blocks, places = torch.cat((a, b)).unique(return_inverse=True)
        a, b = places.chunk(2)
        keys, values = unpacked(store.keys[:, blocks]), unpacked(store.values[:, blocks])
        keys[:, b, :, :, j] = keys[:, a, :, :, i]
        values[:, b, :, j] = values[:, a, :, i]
        store.keys[:, blocks], store.values[:, blocks] = packed(keys), packed(values)

    def _rounded(self, x: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and scales of keys or values (n, kv_heads, d)."""
        if basis is not None:
            return round_in_basis(x, IN_BASIS[self.kind], basis)
        return quantize_rows(x, LIMITS[self.kind]) if self.kind in LIMITS else round_signed(x, SIGNED[self.kind])


def _nibbles(packed: Tensor) -> Tensor:
    """(…, n) bytes to (…, 2n) codes −8..7: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8


def _bytes(codes: Tensor) -> Tensor:
    """The inverse of `_nibbles`."""
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def _three_bits(packed: Tensor) -> Tensor:
    """(…, 6 n) bytes to (…, 16 n) codes −4..3: of each sixteen four bytes of lower bits, then two of upper ones."""
    groups = packed.unflatten(-1, (-1, THREE_BITS))
    pairs, bits = (torch.arange(0, 8, step, dtype=torch.uint8, device=packed.device) for step in (2, 1))
    low = (groups[..., :4, None] >> pairs & 3).flatten(-2)
    high = (groups[..., 4:, None] >> bits & 1).flatten(-2)
    return (low | high << 2).flatten(-2).to(torch.int8) - 4


def _three_bit_bytes(codes: Tensor) -> Tensor:
    """The inverse of `_three_bits`."""
    raw = (codes + 4).to(torch.uint8).unflatten(-1, (-1, VECTOR))
    pairs, bits = (torch.arange(0, 8, step, dtype=torch.uint8, device=codes.device) for step in (2, 1))
    low = ((raw & 3).unflatten(-1, (4, 4)) << pairs).sum(-1, dtype=torch.uint8)
    high = ((raw >> 2).unflatten(-1, (2, 8)) << bits).sum(-1, dtype=torch.uint8)
    return torch.cat((low, high), dim=-1).flatten(-2)


# Of kinds whose codes share bytes: (…, bytes) to (…, codes) int8, and back.
PACKINGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "int4": (_nibbles, _bytes),
    "int3": (_three_bits, _three_bit_bytes),
}
