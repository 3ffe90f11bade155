"""Attention of many rows of a request (prompts): attention_decode.py's steps in the same order, all splits in one
program.

A tile's rows walk the same splits and blocks of keys, each split's result is added to that of the splits before it as
the second kernel of attention_decode.py adds them, and products use the same instruction, m16n8k16: a tile has 32 rows
at most, where 64 would be given to another unit (wgmma) with another order. So a row has the bits that `attend` gives
it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.contract import FLOATS, CacheKind
from runtime.kernels.triton.attention_decode import Heads, Places, compiled_for, padded
from runtime.kernels.triton.attention_softmax import columns
from runtime.kernels.triton.attention_splits import finish, load_queries, one_split
from runtime.kernels.triton.kv_store import layer_parts
from runtime.kv_store import Store


def tile_for(dim: int) -> int:
    """Rows of a tile, a row for each query head of a row of the forward: what fits a processor's registers."""
    return 32 if padded(dim) <= 128 else 16


def attend_many(
    q: Tensor, store: Store, layer: int, kind: CacheKind, heads: Heads, places: Places, out: Tensor | None = None
) -> Tensor:
    """attention_decode.attend for T rows that are chains: the same bits, quicker where each request has many rows.

    q (T, heads, dim) float32 contiguous → the same, into `out` where it is given. `places.tail` is not looked at.
    """
    rows, count, dim = q.shape
    out = torch.empty_like(q) if out is None else out
    if rows == 0:
        return out
    tile = tile_for(dim)
    in_tile = min(count // heads.kv, tile)
    chunks = triton.cdiv(count // heads.kv, in_tile)
    tile_rows = tile // in_tile
    assert heads.factor is None or kind not in FLOATS
    _many_kernel[(triton.cdiv(rows, tile_rows), heads.kv * chunks)](
        q,
        out,
        *layer_parts(store, layer, kind),
        heads.factor,
        places.table,
        places.request,
        places.position,
        rows,
        places.table.shape[1],
        heads.scaling / math.log(2.0),
        HEADS=count,
        KV_HEADS=heads.kv,
        CHUNKS=chunks,
        IN_TILE=in_tile,
        TILE_ROWS=tile_rows,
        TILE=tile,
        **compiled_for(kind, heads, dim),
    )
    return out


@triton.jit(do_not_specialize=["rows", "blocks"])
def _many_kernel(
    q,
    out,
    keys,
    values,
    key_scale,
    value_scale,
    factor,
    table,
    request,
    position,
    rows,
    blocks,
    scaling,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    IN_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # The last tiles see the most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    m = tl.arange(0, TILE)
    member = m // IN_TILE
    row = tile * TILE_ROWS + member
    group: tl.constexpr = HEADS // KV_HEADS
    in_group = chunk * IN_TILE + m % IN_TILE
    valid = (member < TILE_ROWS) & (row < rows) & (in_group < group)
    head = kv_head * group + in_group
    last = tl.load(position + row, mask=valid, other=-1)
    first = tl.zeros_like(last)
    if WINDOW:
        first = tl.maximum(last - WINDOW + 1, 0)
    request_of = tl.load(request + row, mask=valid, other=-1)
    q_high, q_low, q_scale = load_queries(q, factor, row, head, valid, kv_head, scaling, HEADS, DIM, PADDED)
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE, 16), tl.float32)
    mixed = tl.zeros((TILE, PADDED), tl.float32)
    lowest = tl.min(tl.where(last >= 0, first, 2147483647))
    for split in range(lowest // SPLIT, tl.max(last) // SPLIT + 1):
        more_highest, more_total, more_mixed = one_split(
            q_high, q_low, q_scale, tile, member, request_of, first, last, split * SPLIT,
            keys, key_scale, values, value_scale, table, request, position, position, rows, blocks, 1, kv_head,
            KV_HEADS, TILE_ROWS, DIM, WIDE, PADDED, BLOCK, SPLIT, KIND, False, INTERPRETED,
        )  # fmt: skip
        above = tl.maximum(highest, more_highest)
        base = tl.where(above == float("-inf"), 0.0, above)
        decay = tl.exp2(highest - base)[:, None]
        weight = tl.exp2(more_highest - base)[:, None]
        highest = above
        total = tl.fma(more_total, weight + tl.zeros_like(total), total * decay)
        mixed = tl.fma(more_mixed, weight + tl.zeros_like(mixed), mixed * decay)
    dimension, _, exists = columns(WIDE, PADDED, KIND)
    kept = exists & (dimension < DIM)
    to = row.to(tl.int64) * HEADS + head
    finish(out, mixed, tl.max(total, axis=1), to, dimension, valid, kept, valid, last >= 0, DIM)
