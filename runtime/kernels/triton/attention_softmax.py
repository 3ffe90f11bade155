"""One block of keys in a row's attention: what the kernels for few rows and for many have in common.

Tensor cores multiply float16, so a float32 row is split into two float16 terms after a power of two has brought its
largest entry to 2^13..2^14: |x − x₁ − x₂| ≤ 2^-22·|x| + 2^-38·max|x|. Codes of any bits, and float16 keys, are
one exact term. Products are exact in the float32 sums. A row of a tile is a row of the tensor core's instruction,
which is m16n8k16 in all kernels here (wgmma needs 64 rows), so neither its neighbours nor its place changes its bits.
Sums over keys are products with ones for the same reason: a reduction's order would follow the tile's layout.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from runtime.contract import CacheKind
from runtime.kernels.triton.basis import halves_of, level, short_scale


@dataclass(frozen=True)
class Shape:
    """What the kernels of attention are compiled for.

    heads, kv_heads  query heads, and those of keys and values; `chunks` tiles serve the query heads of one of these.
    tile             rows of a tile: `in_tile` query heads of `tile_rows` rows of the forward.
    dim              dimensions of a key: a tile holds `first` of them (a power of two), another one the `rest`, if any.
    value_dim        dimensions of a value; `wide` as they are stored, `padded` as a tile holds them.
    block            keys of one step.
    window           last keys that a row sees; 0: all. chunked: those of its own chunk of so many positions.
    knee             of keys and values in a basis: codes beyond it count double, and they have halves; 0: of others.
    softcap          c: a score s counts as c · tanh(s / c); 0: as it is. In units of ln 2, as scores are here.
    """

    heads: int
    kv_heads: int
    chunks: int
    tile: int
    in_tile: int
    tile_rows: int
    dim: int
    first: int
    rest: int
    value_dim: int
    wide: int
    padded: int
    block: int
    window: int
    chunked: bool
    softcap: float
    kind: CacheKind
    knee: float
    interpreted: bool


@triton.jit
def balance(highest):
    """Powers of two (factor, inverse) for a row with this largest magnitude: factor · highest lies in 2^13..2^14.

    Rows that are infinite or NaN stay so; those below 2^-100 lose digits that no sum would show.
    """
    exponent = (highest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 27), 253)
    factor = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return factor, inverse


@triton.jit
def terms(x):
    """Balanced float32 as the sum of two float16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def row_terms(x):
    """float32 (M, K) as two float16 terms and the power of two (M,) that their product takes."""
    factor, inverse = balance(tl.max(tl.abs(x), axis=1))
    high, low = terms(x * factor[:, None])
    return high, low, inverse


@triton.jit
def times(a, b, total, INTERPRETED: tl.constexpr):
    """total (M, N) + a (M, K) · b (K, N), float16. The interpreter's products look at a row's place: plain sums."""
    if INTERPRETED:
        total += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def product(a_high, a_low, b_high, b_low, TWO: tl.constexpr, INTERPRETED: tl.constexpr):
    """(a_high + a_low) · (b_high + b_low), the smallest products first; b_low counts where TWO."""
    out = tl.zeros((a_high.shape[0], b_high.shape[1]), tl.float32)
    if TWO:
        out = times(a_low, b_low, out, INTERPRETED)
        out = times(a_high, b_low, out, INTERPRETED)
    out = times(a_low, b_high, out, INTERPRETED)
    return times(a_high, b_high, out, INTERPRETED)


@triton.jit
def columns(SHAPE: tl.constexpr):
    """What the columns of a tile of values are: dimension, column in the store, and whether it exists.

    int4 holds dimension i beside i + wide / 2 in one byte: the first half of the columns are the low nibbles.
    """
    at = tl.arange(0, SHAPE.padded)
    if SHAPE.kind == "int4":
        column = at % (SHAPE.padded // 2)
        dimension = (at // (SHAPE.padded // 2)) * (SHAPE.wide // 2) + column
        exists = column < SHAPE.wide // 2
    else:
        column = at
        dimension = at
        exists = at < SHAPE.wide
    return dimension, column, exists


@triton.jit
def stored_keys(keys, page, inside, BEGIN: tl.constexpr, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """Dimensions from BEGIN on of keys (COUNT, n): float32 as they are, others as float16.

    Nothing is masked by position: a mask would split the wide loads, and an unseen score is replaced anyway.
    """
    d = BEGIN + tl.arange(0, COUNT)
    exists = d[:, None] < SHAPE.dim
    if SHAPE.kind == "int4":
        place = page * (SHAPE.dim * 32) + inside % 32
        byte = tl.load(keys + d[:, None] * 32 + place[None, :], mask=exists, other=136).to(tl.int32)
        held = (((byte >> (inside // 32 * 4)[None, :]) & 15) - 8).to(tl.float16)
    elif SHAPE.kind == "int3":
        held = three_bits(keys + d[:, None] * 24 + (page * (SHAPE.dim * 24))[None, :], inside[None, :], exists)
    else:
        place = page * (SHAPE.dim * 64) + inside
        held = tl.load(keys + d[:, None] * 64 + place[None, :], mask=exists, other=0)
        if SHAPE.kind != "float32":
            held = held.to(tl.float16)
    return held


@triton.jit
def three_bits(row, i, exists):
    """Code i of rows of three-bit codes in bytes at `row`, −4..3, float16; 0 where it does not exist."""
    at = row + i // 16 * 6
    low = tl.load(at + i % 16 // 4, mask=exists, other=0).to(tl.int32) >> (i % 4 * 2)
    high = tl.load(at + 4 + i % 16 // 8, mask=exists, other=255).to(tl.int32) >> (i % 8)
    return ((low & 3) + (high & 1) * 4 - 4).to(tl.float16)


@triton.jit
def load_keys(keys, scales, block, inside, head, SHAPE: tl.constexpr):
    """Keys as float16 terms, (first, n) and (rest, n), and scales (n,), of slots `inside` (n,) of blocks `block` (a
    number or (n,)). Where there is no rest, its terms are those of the first dimensions."""
    page = block.to(tl.int64) * SHAPE.kv_heads + head
    high = stored_keys(keys, page, inside, 0, SHAPE.first, SHAPE)
    low = high
    more_high = high
    more_low = high
    if SHAPE.rest:
        more_high = stored_keys(keys, page, inside, SHAPE.first, SHAPE.rest, SHAPE)
        more_low = more_high
    if SHAPE.kind == "float32":
        largest = tl.max(tl.abs(high), axis=0)
        if SHAPE.rest:
            largest = tl.maximum(largest, tl.max(tl.abs(more_high), axis=0))
        factor, scale = balance(largest)
        if SHAPE.rest:
            more_high, more_low = terms(more_high * factor[None, :])
        high, low = terms(high * factor[None, :])
    elif SHAPE.kind == "float16":
        scale = tl.full(inside.shape, 1.0, tl.float32)
    else:
        scale = tl.load(scales + page * 64 + inside)
        if SHAPE.knee > 0:
            high = level(high + halves_of(scale[None, :], tl.arange(0, SHAPE.first)[:, None]), SHAPE.knee)
            low = high
            scale = short_scale(scale)
            more_high = level(more_high, SHAPE.knee) if SHAPE.rest else high
            more_low = more_high
    return high, low, more_high, more_low, scale


@triton.jit
def load_values(values, scales, block, inside, seen, head, SHAPE: tl.constexpr):
    """Values (n, padded) as float16 terms and scales (n,); zero where not `seen` (n,), for 0 · ∞ is no number."""
    dimension, column, exists = columns(SHAPE)
    size: tl.constexpr = SHAPE.wide // 2 if SHAPE.kind == "int4" else SHAPE.wide
    packed: tl.constexpr = SHAPE.wide // 16 * 6
    slot = (block.to(tl.int64) * SHAPE.kv_heads + head) * 64 + inside
    there = seen[:, None] & exists[None, :]
    if SHAPE.kind == "int3":
        held = three_bits(values + slot[:, None] * packed, column[None, :], there)
    else:
        held = tl.load(values + slot[:, None] * size + column[None, :], mask=there, other=0)
    if SHAPE.kind == "float32":
        factor, scale = balance(tl.max(tl.abs(held), axis=1))
        high, low = terms(held * factor[:, None])
    elif SHAPE.kind == "float16":
        high = held
        scale = tl.full(inside.shape, 1.0, tl.float32)
    else:
        scale = tl.load(scales + slot, mask=seen, other=0.0)
        if SHAPE.kind == "int4":
            shift = tl.arange(0, SHAPE.padded) // (SHAPE.padded // 2) * 4
            high = (((held.to(tl.int32) >> shift[None, :]) & 15) - 8).to(tl.float16)
        else:
            high = held.to(tl.float16)
        if SHAPE.knee > 0:
            high = level(high + halves_of(scale[:, None], dimension[None, :]), SHAPE.knee)
            scale = short_scale(scale)
    if SHAPE.kind != "float32":
        low = high
    return high, low, scale


@triton.jit
def capped(score, CAP: tl.constexpr):
    """CAP · tanh(score / CAP) of scores and a cap in units of ln 2; the error is below 3e-7 · CAP."""
    double: tl.constexpr = 2.8853900817779268 / CAP
    return (1.0 - 2.0 / (tl.exp2(score * double) + 1.0)) * CAP


@triton.jit
def step(queries, state, first, last, active, at, bound, block, inside, cache, head, SHAPE: tl.constexpr):
    """One block of n keys at logical positions `at` (n,), added to `state`.

    queries  of `load_queries`; cache: keys, values and their scales; state: (highest (M,), total (M, 16),
             mixed (M, padded)).
    Rows that are `active` see positions first..last; `bound` is the last position that any of them sees. A row that
    sees no key of the block, or is not active, keeps its bits. (Online softmax: Milakov and Gimelshein, 1805.02867.)
    """
    two: tl.constexpr = SHAPE.kind == "float32"
    q_high, q_low, q_more_high, q_more_low, q_scale = queries
    highest, total, mixed = state
    keys, values, key_scale, value_scale = cache
    k_high, k_low, k_more_high, k_more_low, k_scale = load_keys(keys, key_scale, block, inside, head, SHAPE)
    score = product(q_high, q_low, k_high, k_low, two, SHAPE.interpreted)
    if SHAPE.rest:
        score += product(q_more_high, q_more_low, k_more_high, k_more_low, two, SHAPE.interpreted)
    score = score * k_scale[None, :] * q_scale[:, None]
    if SHAPE.softcap > 0.0:
        score = capped(score, SHAPE.softcap)
    seen = active[:, None] & (at[None, :] <= last[:, None]) & (at[None, :] >= first[:, None])
    score = tl.where(seen, score, float("-inf"))
    above = tl.maximum(highest, tl.max(score, axis=1))
    base = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(highest - base)

    w_high, w_low = terms(weight * 8192.0)
    ones = tl.full((at.shape[0], 16), 1.0, tl.float16)
    added = product(w_high, w_low, ones, ones, False, SHAPE.interpreted) * 0.0001220703125
    v_high, v_low, v_scale = load_values(values, value_scale, block, inside, at <= bound, head, SHAPE)
    if SHAPE.kind == "float16":
        part = product(w_high, w_low, v_high, v_low, two, SHAPE.interpreted) * 0.0001220703125
    else:
        w_high, w_low, w_scale = row_terms(weight * v_scale[None, :])
        part = product(w_high, w_low, v_high, v_low, two, SHAPE.interpreted) * w_scale[:, None]
    new_total = tl.fma(total, decay[:, None] + tl.zeros_like(total), added)
    new_mixed = tl.fma(mixed, decay[:, None] + tl.zeros_like(mixed), part)
    on = active[:, None]
    return tl.where(active, above, highest), tl.where(on, new_total, total), tl.where(on, new_mixed, mixed)
