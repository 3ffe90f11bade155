"""What the attention kernels do with one split of the keys, and how the splits' results are joined, first to last.

attention_decode.py launches `split_kernel` and `combine_kernel`; attention_prefill.py takes the same steps in its own
order of programs.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.attention_softmax import balance, columns, step, terms

# Logical positions of one split, of the first NEAR_SPLITS of them and of all others: short ones, for a program takes as
# long as its split, and not too many. Part of what a row's bits mean: the same in all kernels.
NEAR: tl.constexpr = tl.constexpr(64)
NEAR_SPLITS: tl.constexpr = tl.constexpr(16)
FAR: tl.constexpr = tl.constexpr(256)


def splits_for(tokens: int) -> int:
    """Splits that rows below position `tokens` need: at least 1."""
    near, count = NEAR.value, NEAR_SPLITS.value
    return max(1, -(-tokens // near)) if tokens <= near * count else count - (near * count - tokens) // FAR.value


@triton.jit
def split_at(position):
    """The split that a position (0 or above) is in."""
    near = NEAR * NEAR_SPLITS
    return tl.where(position < near, position // NEAR, NEAR_SPLITS + (position - near) // FAR)


@triton.jit
def begin_of(split):
    """The first position of a split."""
    return tl.where(split < NEAR_SPLITS, split * NEAR, NEAR * NEAR_SPLITS + (split - NEAR_SPLITS) * FAR)


@triton.jit
def load_tile(tile, places, rows, SHAPE: tl.constexpr):
    """The rows (M,) of a tile of this program: row of the forward, its place in the tile, query head, whether it is
    there, its request, first and last position that it sees; and the tile's head of keys and values."""
    _, request, position, _, _ = places
    kv_head, chunk = tl.program_id(1) // SHAPE.chunks, tl.program_id(1) % SHAPE.chunks
    m = tl.arange(0, SHAPE.tile)
    member = m // SHAPE.in_tile
    row = tile * SHAPE.tile_rows + member
    group: tl.constexpr = SHAPE.heads // SHAPE.kv_heads
    in_group = chunk * SHAPE.in_tile + m % SHAPE.in_tile
    valid = (member < SHAPE.tile_rows) & (row < rows) & (in_group < group)
    last = tl.load(position + row, mask=valid, other=-1)
    first = tl.zeros_like(last)
    if SHAPE.window:
        if SHAPE.chunked:
            first = tl.maximum(last, 0) // SHAPE.window * SHAPE.window
        else:
            first = tl.maximum(last - SHAPE.window + 1, 0)
    request_of = tl.load(request + row, mask=valid, other=-1)
    return row, member, kv_head * group + in_group, valid, request_of, first, last, kv_head


@triton.jit
def scaled_queries(
    q, factor, row, head, valid, kv_head, scaling, BEGIN: tl.constexpr, COUNT: tl.constexpr, SHAPE: tl.constexpr
):
    """Dimensions from BEGIN on of the queries (M, COUNT) of rows and heads (M,), scaled, float32."""
    d = BEGIN + tl.arange(0, COUNT)
    there = valid[:, None] & (d[None, :] < SHAPE.dim)
    at = (row.to(tl.int64) * SHAPE.heads + head)[:, None] * SHAPE.dim + d[None, :]
    x = tl.load(q + at, mask=there, other=0.0) * scaling
    if factor is not None:
        x = x * tl.load(factor + kv_head * SHAPE.dim + d, mask=d < SHAPE.dim, other=0.0)[None, :]
    return x


@triton.jit
def load_queries(q, factor, row, head, valid, kv_head, scaling, SHAPE: tl.constexpr):
    """Queries of rows and heads (M,), scaled, in float16 terms as `load_keys` has them, (M, first) and (M, rest), and
    the terms' power of two (M,)."""
    x = scaled_queries(q, factor, row, head, valid, kv_head, scaling, 0, SHAPE.first, SHAPE)
    largest = tl.max(tl.abs(x), axis=1)
    if SHAPE.rest:
        more = scaled_queries(q, factor, row, head, valid, kv_head, scaling, SHAPE.first, SHAPE.rest, SHAPE)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=1))
    by, inverse = balance(largest)
    high, low = terms(x * by[:, None])
    more_high = high
    more_low = low
    if SHAPE.rest:
        more_high, more_low = terms(more * by[:, None])
    return high, low, more_high, more_low, inverse


@triton.jit
def join(highest, total, mixed, more_highest, more_total, more_mixed):
    """A row's result over its first splits and that of the next: (highest, total, mixed), of the shapes of `mixed`."""
    above = tl.maximum(highest, more_highest)
    decay = tl.exp2(highest - above)
    weight = tl.exp2(more_highest - above)
    return above, tl.fma(more_total, weight, total * decay), tl.fma(more_mixed, weight, mixed * decay)


@triton.jit
def nothing_seen(SHAPE: tl.constexpr):
    """The state of a tile's rows before the first key."""
    tile: tl.constexpr = SHAPE.tile
    padded: tl.constexpr = SHAPE.padded
    highest = tl.full((tile,), float("-inf"), tl.float32)
    return highest, tl.zeros((tile, 16), tl.float32), tl.zeros((tile, padded), tl.float32)


@triton.jit
def one_split(
    queries, tile, member, request_of, first, last, split, cache, places, rows, blocks, width, kv_head,
    SHAPE: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """(highest (M,), total (M, 16), mixed (M, padded)) of a tile's rows over the positions of a split.

    One pass over the keys for each request that the tile's rows belong to; in a tree one for each row over the blocks
    that hold positions from `start` on.

    places  (table, request, position, start, tail).
    """
    table, request, _, start, tail = places
    count: tl.constexpr = SHAPE.block
    state = nothing_seen(SHAPE)
    begin, end = begin_of(split), begin_of(split + 1)
    n = tl.arange(0, count)
    for r in range(0, SHAPE.tile_rows):
        row = tile * SHAPE.tile_rows + r
        mine = tl.load(request + row, mask=row < rows, other=-1)
        before = tl.load(request + row - 1, mask=(row < rows) & (r > 0), other=-2)
        active = (request_of == mine) & (last >= 0) & (mine != before) & (row < rows)
        bound = tl.max(tl.where(active, last, -1))
        lowest = tl.min(tl.where(active, first, 2147483647))
        low = tl.maximum(begin, lowest // count * count)
        high = tl.minimum(end, bound + 1)
        # Not even a loop without a turn is free.
        if bound >= begin:
            shared = high
            if TREE:
                own = tl.load(start + row, mask=row < rows, other=0)
                shared = tl.minimum(high, own // count * count)
            for at in range(low, shared, count):
                block = tl.load(table + mine.to(tl.int64) * blocks + at // 64)
                inside = n
                if count < 64:
                    # Said aloud, for wide loads: the compiler does not see it.
                    inside += tl.multiple_of(at % 64, count)
                state = step(queries, state, first, last, active, at + n, bound, block, inside, cache, kv_head, SHAPE)
            if TREE:
                for own_row in range(0, SHAPE.tile_rows):
                    only = active & (member == own_row)
                    reach = tl.max(tl.where(only, last, -1))
                    low_own = tl.maximum(low, shared)
                    for at in range(low_own, tl.minimum(high, reach + 1), count):
                        p = at + n
                        there = (p >= own) & (p <= reach)
                        place = tail + (tile * SHAPE.tile_rows + own_row).to(tl.int64) * width + (p - own)
                        slot = tl.where(p < own, p, tl.load(place, mask=there, other=0))
                        block = tl.load(table + mine.to(tl.int64) * blocks + slot // 64)
                        state = step(
                            queries, state, first, last, only, p, reach, block, slot % 64, cache, kv_head, SHAPE
                        )
    return state


@triton.jit(do_not_specialize=["rows", "blocks", "width", "splits"])
def split_kernel(
    q, out, mixed_out, sums_out, cache, factor, sinks, places, rows, blocks, width, splits, scaling,
    SHAPE: tl.constexpr, TREE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    row, member, head, valid, request_of, first, last, kv_head = load_tile(tile, places, rows, SHAPE)
    begin = begin_of(split)
    # A program beyond all of its rows has nothing to do, and nobody reads what it would write.
    if (tl.max(last) >= begin) | ALONE:
        queries = load_queries(q, factor, row, head, valid, kv_head, scaling, SHAPE)
        highest, total, mixed = one_split(
            queries, tile, member, request_of, first, last, split, cache, places, rows, blocks, width, kv_head,
            SHAPE, TREE,
        )  # fmt: skip
        dimension, _, exists = columns(SHAPE)
        kept = exists & (dimension < SHAPE.value_dim)
        total = tl.max(total, axis=1)
        if ALONE:
            finish(
                out, highest, mixed, total, sinks, row, head, dimension, valid, kept, last < NEAR, last >= 0,
                SHAPE.heads, SHAPE.value_dim,
            )  # fmt: skip
        else:
            place = (row.to(tl.int64) * SHAPE.heads + head) * splits + split
            reached = valid & (last >= begin) & (first < begin_of(split + 1))
            there = reached[:, None] & kept[None, :]
            tl.store(mixed_out + place[:, None] * SHAPE.value_dim + dimension[None, :], mixed, mask=there)
            tl.store(sums_out + place * 2, highest, mask=reached)
            tl.store(sums_out + place * 2 + 1, total, mask=reached)


@triton.jit
def beside_sink(highest, sink):
    """What a row's sums are multiplied by, and what its total grows by, where `sink` is a score that has no value."""
    sink = sink * 1.4426950408889634
    above = tl.maximum(highest, sink)
    return tl.exp2(highest - above), tl.exp2(sink - above)


@triton.jit
def finish(
    out, highest, mixed, total, sinks, row, head, dimension, valid, kept, within, held, HEADS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Writes mixed / total; 0 for rows that hold nothing, NaN for those that were not `within` the launched splits."""
    if sinks is not None:
        decay, weight = beside_sink(highest, tl.load(sinks + head, mask=valid, other=0.0))
        total = tl.fma(total, decay, weight)
        mixed = mixed * decay[:, None]
    result = tl.div_rn(mixed, tl.where(held, total, 1.0)[:, None] + tl.zeros_like(mixed))
    result = tl.where(within[:, None], result, float("nan"))
    to = row.to(tl.int64) * HEADS + head
    tl.store(out + to[:, None] * DIM + dimension[None, :], result, mask=valid[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    mixed_in, sums_in, out, sinks, position, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(position + row)
    first = 0
    if WINDOW:
        first = tl.maximum(last, 0) // WINDOW * WINDOW if CHUNKED else tl.maximum(last - WINDOW + 1, 0)
    d = tl.arange(0, PADDED)
    kept = d < DIM
    base = (row.to(tl.int64) * HEADS + head) * splits
    end = tl.minimum(split_at(tl.maximum(last, 0)) + 1, splits)
    # NaN until a split was seen would spoil the first: exp2(−inf − −inf).
    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED,), tl.float32)
    if last >= 0:
        for at in range(split_at(tl.maximum(first, 0)), end, AT_ONCE):
            # Without a branch, so that all of them are on their way before the first is added.
            for i in tl.static_range(0, AT_ONCE):
                there = at + i < end
                place = base + at + i
                more_highest = tl.load(sums_in + place * 2, mask=there, other=0.0) + tl.zeros_like(mixed)
                more_total = tl.load(sums_in + place * 2 + 1, mask=there, other=0.0) + tl.zeros_like(mixed)
                more = tl.load(mixed_in + place * DIM + d, mask=there & kept, other=0.0)
                new_highest, new_total, new_mixed = join(highest, total, mixed, more_highest, more_total, more)
                highest = tl.where(there, new_highest, highest)
                total = tl.where(there, new_total, total)
                mixed = tl.where(there, new_mixed, mixed)
    if sinks is not None:
        decay, weight = beside_sink(highest, tl.load(sinks + head))
        total = tl.fma(total, decay, weight)
        mixed = mixed * decay
    result = tl.div_rn(mixed, tl.where(last >= 0, total, 1.0))
    result = tl.where(last < begin_of(splits), result, float("nan"))
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, result, mask=kept)
