"""Keys and values into a kv_store.Store on the device, with the bits of quantizer.CacheFormat, and moved within it.

Slots are physical: block · 64 + place in the block. Nothing here waits for the device or allocates.
"""

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.contract import FLOATS, CacheKind
from runtime.kernels.triton.basis import rounded_in_basis, rounded_signed, turned_memory, turned_registers
from runtime.kernels.triton.exact import nearest
from runtime.kv_store import IN_BASIS, LIMITS, SIGNED, VECTOR, Levels, Store

# Kinds whose neighbouring codes share bytes.
SHARED = ("int4", "int3")


def layer_parts(store: Store, layer: int, kind: CacheKind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales of one layer; scales without elements for floats."""
    k, v = store.key_scale, store.value_scale
    return store.keys[layer], store.values[layer], *((k, v) if kind in FLOATS else (k[layer], v[layer]))


def writable_parts(store: Store, layer: int, kind: CacheKind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As layer_parts, keys that share bytes as words of four: the smallest that atomic operations take."""
    keys, values, key_scale, value_scale = layer_parts(store, layer, kind)
    return keys.view(torch.int32) if kind in SHARED else keys, values, key_scale, value_scale


@dataclass(frozen=True)
class Written:
    """What kernels that write keys or values of `dim` dimensions are compiled for.

    limit   the largest code; signed_limit: of rows with signed scales, as kv_store.SIGNED has it.
    basis_limit, half, knee  of rows in a basis, as kv_store.IN_BASIS has them; half of others with signed scales too.
    """

    kv_heads: int
    dim: int
    wide: int
    padded: int
    kind: CacheKind
    limit: float
    signed_limit: float
    basis_limit: float
    half: int
    knee: float


def written(kind: CacheKind, kv_heads: int, dim: int) -> Written:
    """The description of a cache: a head takes `wide` places in it, and `padded` ones in a kernel."""
    wide = -(-dim // VECTOR) * VECTOR
    return Written(
        *(kv_heads, dim, wide, triton.next_power_of_2(wide), kind, LIMITS.get(kind, 0.0)),
        SIGNED.get(kind, (0.0, 0))[0],
        *astuple(IN_BASIS.get(kind, Levels(0.0, 0, 0.0))),
    )


def move(store: Store, kind: CacheKind, source: Tensor, target: Tensor) -> None:
    """Copies slots (n,) int on the device to others, in all layers; what is read is read before anything is written.

    Pairs with a target below 0 are left out. n is at most 64; targets are distinct.
    """
    count = len(source)
    if count > 64:
        raise ValueError(f"at most 64 slots can be moved at once, found {count}")
    layers, blocks, heads, dim = store.keys.shape[:4]
    if not count or not layers:
        return
    keys = store.keys.view(torch.int32) if kind in SHARED else store.keys
    row = store.values.shape[-1]
    padded = triton.next_power_of_2
    _move_kernel[(layers, heads)](
        keys, store.values, store.key_scale, store.value_scale, source, target, blocks, count,
        KV_HEADS=heads, DIM=dim, ROW=row, KEYS_PADDED=padded(dim), ROW_PADDED=padded(row), KIND=kind,
        SCALED=kind not in FLOATS, COUNT=padded(count),
    )  # fmt: skip


@triton.jit
def rounded(x, LIMIT: tl.constexpr):
    """quantize_rows of one row, zeros where nothing is: codes as float32, and the step."""
    bad = tl.max((x != x).to(tl.int32), axis=0) > 0
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), LIMIT)
    scale = tl.where(bad, float("nan"), scale)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)
    inverse = tl.where(inverse == float("inf"), 0.0, inverse)
    code = nearest(x * inverse)
    code = tl.where(code < -LIMIT, -LIMIT, tl.where(code > LIMIT, LIMIT, code))
    return tl.where(code == code, code, 0.0), scale


@triton.jit
def write_key(x, memory, scales, slot, head, basis, CACHE: tl.constexpr):
    """One key x (padded,), divided by its factors and zero beyond dim, to a slot (int64).

    basis  the layer's, or None.
    """
    d = tl.arange(0, CACHE.padded)
    page = slot // 64 * CACHE.kv_heads + head
    inside = slot % 64
    if CACHE.kind == "float32" or CACHE.kind == "float16":
        tl.store(memory + (page * CACHE.dim + d) * 64 + inside, x.to(memory.dtype.element_ty), mask=d < CACHE.dim)
    else:
        if basis is not None:
            own = basis + head * (3 * CACHE.dim * CACHE.dim)
            x = turned_registers(x, own, d, d < CACHE.dim, CACHE.dim, CACHE.padded)
            feedback = own + CACHE.dim * CACHE.dim
            code, scale = rounded_in_basis(x, d, d < CACHE.dim, feedback, CACHE)
        elif CACHE.kind == "int3":
            code, scale = rounded_signed(x, d < CACHE.dim, CACHE.signed_limit, CACHE.half)
        else:
            code, scale = rounded(x, CACHE.limit)
        tl.store(scales + page * 64 + inside, scale)
        if CACHE.kind == "int3":
            row = memory + (page * CACHE.dim + d) * 6
            raw = code.to(tl.int32) + 4
            low, high = three_bit_places(inside)
            flip_bits(row + low // 32, (low % 32).to(tl.int32), raw & 3, 3, d < CACHE.dim)
            flip_bits(row + high // 32, (high % 32).to(tl.int32), raw >> 2, 1, d < CACHE.dim)
        elif CACHE.kind == "int8":
            tl.store(memory + (page * CACHE.dim + d) * 64 + inside, code.to(tl.int8), mask=d < CACHE.dim)
        else:
            word = memory + (page * CACHE.dim + d) * 8 + inside % 32 // 4
            shift = (inside % 4 * 8 + inside // 32 * 4).to(tl.int32)
            flip_bits(word, shift, code.to(tl.int32) + 8, 15, d < CACHE.dim)


@triton.jit
def three_bit_places(inside):
    """The bits of a row of three-bit codes at which the lower two and the upper one of code `inside` begin."""
    group = inside // 16 * 48
    return group + inside % 16 * 2, group + 32 + inside % 16


@triton.jit
def flip_bits(word, shift, code, mask: tl.constexpr, there):
    """Sets the bits of `mask` at `shift` of words to a code. Codes that share a word may be written at once: each flips
    those of its own bits that change, in one atomic operation, and nobody else changes those."""
    held = tl.load(word, mask=there, other=0)
    change = ((held >> shift) ^ code) & mask
    tl.atomic_xor(word, change << shift, mask=there, sem="relaxed")


@triton.jit
def value_codes(source, d, real, head, basis, CACHE: tl.constexpr):
    """Codes, entry d where `d` (padded,) says, and the scale of one value at `source`."""
    if basis is not None:
        own = basis + head * (3 * CACHE.dim * CACHE.dim)
        x = turned_memory(source, own, d, real, CACHE.dim, CACHE.padded)
        feedback = own + CACHE.dim * CACHE.dim
        code, scale = rounded_in_basis(x, d, real, feedback, CACHE)
    elif CACHE.kind == "int3":
        x = tl.load(source + d, mask=real, other=0.0)
        code, scale = rounded_signed(x, real, CACHE.signed_limit, CACHE.half)
    else:
        code, scale = rounded(tl.load(source + d, mask=real, other=0.0), CACHE.limit)
    return code, scale


@triton.jit
def write_value(source, memory, scales, slot, head, basis, CACHE: tl.constexpr):
    """One value, dim float32 at `source`, to a slot (int64); basis: the layer's, or None."""
    at = slot // 64 * CACHE.kv_heads + head
    at = at * 64 + slot % 64
    if CACHE.kind == "int3":
        d = tl.arange(0, CACHE.padded)
        code, scale = value_codes(source, d, d < CACHE.dim, head, basis, CACHE)
        raw = tl.where(d < CACHE.dim, code.to(tl.int32) + 4, 0)
        row = memory + at * (CACHE.wide // 16 * 6)
        fours = tl.reshape(raw & 3, (CACHE.padded // 4, 4)) << (tl.arange(0, 4) * 2)[None, :]
        i = tl.arange(0, CACHE.padded // 4)
        tl.store(row + i // 4 * 6 + i % 4, tl.sum(fours, axis=1).to(tl.uint8), mask=i < CACHE.wide // 4)
        eights = tl.reshape(raw >> 2, (CACHE.padded // 8, 8)) << tl.arange(0, 8)[None, :]
        i = tl.arange(0, CACHE.padded // 8)
        tl.store(row + i // 2 * 6 + 4 + i % 2, tl.sum(eights, axis=1).to(tl.uint8), mask=i < CACHE.wide // 8)
        tl.store(scales + at, scale)
    elif CACHE.kind == "int4":
        half: tl.constexpr = CACHE.wide // 2
        padded: tl.constexpr = CACHE.padded
        # Two rows: dimension i over dimension i + wide / 2, whose codes share a byte.
        i = tl.arange(0, CACHE.padded // 2)[None, :]
        upper = tl.arange(0, 2)[:, None]
        d = upper * half + i
        real = (i < half) & (d < CACHE.dim)
        flat, scale = value_codes(source, tl.reshape(d, (padded,)), tl.reshape(real, (padded,)), head, basis, CACHE)
        code = tl.reshape(flat, (2, padded // 2)).to(tl.int32) + 8
        # What pads a head stays as memory began: zero bits.
        byte = tl.sum(tl.where(real, code, 0) << (upper * 4), axis=0)
        i = tl.arange(0, CACHE.padded // 2)
        tl.store(memory + at * half + i, byte.to(tl.uint8), mask=i < half)
        tl.store(scales + at, scale)
    else:
        d = tl.arange(0, CACHE.padded)
        x = tl.load(source + d, mask=d < CACHE.dim, other=0.0)
        if CACHE.kind == "int8":
            x, scale = rounded(x, CACHE.limit)
            tl.store(scales + at, scale)
        tl.store(memory + at * CACHE.wide + d, x.to(memory.dtype.element_ty), mask=d < CACHE.dim)


@triton.jit(do_not_specialize=["blocks", "count"])
def _move_kernel(
    keys, values, key_scale, value_scale, source, target, blocks, count,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, KEYS_PADDED: tl.constexpr, ROW_PADDED: tl.constexpr,
    KIND: tl.constexpr, SCALED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, COUNT)
    a = tl.load(source + n, mask=n < count, other=0).to(tl.int64)
    b = tl.load(target + n, mask=n < count, other=-1).to(tl.int64)
    moved = b >= 0
    b = tl.maximum(b, 0)
    a_page, a_in = (layer * blocks + a // 64) * KV_HEADS + head, a % 64
    b_page, b_in = (layer * blocks + b // 64) * KV_HEADS + head, b % 64
    d = tl.arange(0, KEYS_PADDED)
    c = tl.arange(0, ROW_PADDED)
    there = moved[:, None] & (d < DIM)[None, :]
    row_there = moved[:, None] & (c < ROW)[None, :]
    value = tl.load(values + (a_page * 64 + a_in)[:, None] * ROW + c[None, :], mask=row_there)
    if SCALED:
        k_scale = tl.load(key_scale + a_page * 64 + a_in, mask=moved)
        v_scale = tl.load(value_scale + a_page * 64 + a_in, mask=moved)
    if KIND == "int3":
        b_low, b_high = three_bit_places(b_in)
        a_low, a_high = three_bit_places(a_in)
        from_row = keys + (a_page[:, None] * DIM + d[None, :]) * 6
        to_row = keys + (b_page[:, None] * DIM + d[None, :]) * 6
        low = tl.load(from_row + (a_low // 32)[:, None], mask=there, other=0) >> (a_low % 32).to(tl.int32)[:, None]
        high = tl.load(from_row + (a_high // 32)[:, None], mask=there, other=0) >> (a_high % 32).to(tl.int32)[:, None]
    elif KIND == "int4":
        word = keys + (b_page[:, None] * DIM + d[None, :]) * 8 + (b_in % 32 // 4)[:, None]
        shift = (b_in % 4 * 8 + b_in // 32 * 4).to(tl.int32)[:, None]
        from_word = keys + (a_page[:, None] * DIM + d[None, :]) * 8 + (a_in % 32 // 4)[:, None]
        from_shift = (a_in % 4 * 8 + a_in // 32 * 4).to(tl.int32)[:, None]
        code = tl.load(from_word, mask=there, other=0) >> from_shift
        change = ((tl.load(word, mask=there, other=0) >> shift) ^ code) & 15
    else:
        key = tl.load(keys + (a_page[:, None] * DIM + d[None, :]) * 64 + a_in[:, None], mask=there)
    tl.debug_barrier()
    if KIND == "int3":
        flip_bits(to_row + (b_low // 32)[:, None], (b_low % 32).to(tl.int32)[:, None], low, 3, there)
        flip_bits(to_row + (b_high // 32)[:, None], (b_high % 32).to(tl.int32)[:, None], high, 1, there)
    elif KIND == "int4":
        tl.atomic_xor(word, change << shift, mask=there, sem="relaxed")
    else:
        tl.store(keys + (b_page[:, None] * DIM + d[None, :]) * 64 + b_in[:, None], key, mask=there)
    tl.store(values + (b_page * 64 + b_in)[:, None] * ROW + c[None, :], value, mask=row_there)
    if SCALED:
        tl.store(key_scale + b_page * 64 + b_in, k_scale, mask=moved)
        tl.store(value_scale + b_page * 64 + b_in, v_scale, mask=moved)
