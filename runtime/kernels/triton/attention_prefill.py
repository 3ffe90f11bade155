"""Attention of many rows of a request (prompts): attention_decode.py's steps in the same order, all splits in one
program.

A tile's rows walk the same splits and blocks of keys, each split's result is added to that of the splits before it as
the second kernel of attention_decode.py adds them, and products use the same instruction, m16n8k16: a tile has 32 rows
at most, where 64 would be given to another unit (wgmma) with another order. So a row has the bits that `attend` gives
it.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from runtime.contract import FLOATS, CacheKind
from runtime.kernels.triton.attention_decode import Heads, Places, shape_for, stages, widest
from runtime.kernels.triton.attention_softmax import columns
from runtime.kernels.triton.attention_splits import finish, load_queries, load_tile, nothing_seen, one_split, split_at
from runtime.kernels.triton.kv_store import layer_parts
from runtime.kv_store import Store


def tile_for(dim: int) -> int:
    """Rows of a tile, a row for each query head of a row of the forward: what fits a processor's registers."""
    return 32 if widest(dim) <= 128 else 16


def attend_many(
    q: Tensor, store: Store, layer: int, kind: CacheKind, heads: Heads, places: Places, out: Tensor | None = None
) -> Tensor:
    """attention_decode.attend for T rows that are chains: the same bits, quicker where each request has many rows.

    q (T, heads, dim) float32 contiguous → (T, heads, value_dim), into `out` where it is given. `places.tail` is not
    looked at.
    """
    rows, count, dim = q.shape
    out = q.new_empty((rows, count, heads.values)) if out is None else out
    if rows == 0:
        return out
    shape = shape_for(count, dim, kind, heads, tile_for(dim), sharing=tile_for(dim))
    assert heads.factor is None or kind not in FLOATS
    # Chains look at neither `start` nor `tail`.
    where = (places.table, places.request, places.position, places.position, places.position)
    _many_kernel[(triton.cdiv(rows, shape.tile_rows), heads.kv * shape.chunks)](
        q, out, layer_parts(store, layer, kind), heads.factor, heads.sinks, where,
        rows, places.table.shape[1], heads.scaling / math.log(2.0),
        SHAPE=shape, num_warps=4, num_stages=stages(kind, dim), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "blocks"])
def _many_kernel(q, out, cache, factor, sinks, places, rows, blocks, scaling, SHAPE: tl.constexpr):
    # The last tiles see the most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, member, head, valid, request_of, first, last, kv_head = load_tile(tile, places, rows, SHAPE)
    queries = load_queries(q, factor, row, head, valid, kv_head, scaling, SHAPE)
    highest, total, mixed = nothing_seen(SHAPE)
    lowest = tl.min(tl.where(last >= 0, first, 2147483647))
    for split in range(split_at(lowest), split_at(tl.max(last)) + 1):
        more_highest, more_total, more_mixed = one_split(
            queries, tile, member, request_of, first, last, split, cache, places, rows, blocks, 1, kv_head,
            SHAPE, False,
        )  # fmt: skip
        above = tl.maximum(highest, more_highest)
        base = tl.where(above == float("-inf"), 0.0, above)
        decay = tl.exp2(highest - base)[:, None]
        weight = tl.exp2(more_highest - base)[:, None]
        highest = above
        total = tl.fma(more_total, weight + tl.zeros_like(total), total * decay)
        mixed = tl.fma(more_mixed, weight + tl.zeros_like(mixed), mixed * decay)
    dimension, _, exists = columns(SHAPE)
    kept = exists & (dimension < SHAPE.value_dim)
    finish(
        out, highest, mixed, tl.max(total, axis=1), sinks, row, head, dimension, valid, kept, valid, last >= 0,
        SHAPE.heads, SHAPE.value_dim,
    )  # fmt: skip
