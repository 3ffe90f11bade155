"""Attention of few rows (plain decoding, verifying chains and trees, batches) over the caches of runtime/kv_store.py.

Keys are split by absolute logical position, a program for each split, and the splits' results are added first to last
(flash-decoding: Dao, Haziza, Massa and Sizov, 2023). A row's bits are a function of its query and the keys it sees in
their logical order: not of how many rows or splits share the launch, which pages hold the keys, or whether the row
stands in a chain or a tree.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from runtime.contract import FLOATS, CacheKind
from runtime.kernels.triton import interpreted
from runtime.kernels.triton.attention_softmax import Shape
from runtime.kernels.triton.attention_splits import combine_kernel, split_kernel
from runtime.kernels.triton.kv_store import layer_parts
from runtime.kv_store import IN_BASIS, VECTOR, Store

# Rows of a tile, one per query head of a row of the forward: the tensor cores' instruction has as many.
TILE = 16
# Warps of a program. No bit depends on it.
_WARPS = 4
# Dimensions of a key up to which one tile holds them all.
_WHOLE = 256
# Splits that the second kernel reads at once.
_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class Places:
    """Where the T rows of a forward find their keys; all int32 on the device.

    table     (R, B): block of the store that holds a request's slots 64·b .. 64·b + 63.
    request   (T,): row of `table`; rows of one request are adjacent.
    position  (T,): logical position, the last one that the row sees; −1: an empty row, whose result is 0.
    start     (T,): keys at positions below it lie in the slot of that number; the same for all rows of a request.
    tail      (T, W): slot of the key at position start + i for the row; None, or W = 0: start + i, chains.
    """

    table: Tensor
    request: Tensor
    position: Tensor
    start: Tensor
    tail: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Heads:
    """How a layer attends: query heads, key and value heads, dimensions of a key, the scores' factor, the window.

    factor  (kv_heads, head_dim) float32 that the cache's keys were divided by; None: 1.
    window  a row sees this many last keys; None: all. chunked: those of its own chunk of so many positions.
    value_dim  dimensions of a value; None: as many as of a key.
    softcap  c: a score s counts as c · tanh(s / c); 0: as it is.
    sinks   (queries,) float32: scores besides, which have no values.
    in_basis  keys and values are stored in a basis: q is in the keys', and so is what comes out in the values'.
    """

    queries: int
    kv: int
    dim: int
    scaling: float
    window: int | None = None
    factor: Tensor | None = None
    chunked: bool = False
    value_dim: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    in_basis: bool = False

    @property
    def values(self) -> int:
        """Dimensions of a value."""
        return self.dim if self.value_dim is None else self.value_dim


def shape_for(count: int, dim: int, kind: CacheKind, heads: Heads, tile: int, sharing: int) -> Shape:
    """What kernels are compiled for: `count` query heads, tiles of so many rows, `sharing` rows of a request."""
    in_tile, (first, rest) = min(count // heads.kv, tile), tiles_of(dim)
    return Shape(
        heads=count,
        kv_heads=heads.kv,
        chunks=triton.cdiv(count // heads.kv, in_tile),
        tile=tile,
        in_tile=in_tile,
        tile_rows=max(1, min(tile // in_tile, triton.next_power_of_2(sharing))),
        dim=dim,
        first=first,
        rest=rest,
        value_dim=heads.values,
        wide=-(-heads.values // VECTOR) * VECTOR,
        padded=padded(heads.values),
        block=block_for(kind, dim),
        window=heads.window or 0,
        chunked=heads.chunked,
        softcap=heads.softcap / math.log(2.0),
        kind=kind,
        knee=IN_BASIS[kind].knee if heads.in_basis else 0.0,
        interpreted=interpreted(),
    )


def padded(dim: int) -> int:
    """Columns of a tile of values of `dim` dimensions."""
    return triton.next_power_of_2(-(-dim // VECTOR) * VECTOR)


def tiles_of(dim: int) -> tuple[int, int]:
    """Columns of the tiles that hold the first dimensions of a key, and the rest of it (0: it has none).

    Latent attention's keys of 512 + 64 would leave nearly half of one tile empty.
    """
    whole = padded(dim)
    return (whole, 0) if dim <= _WHOLE or dim == whole else (whole // 2, padded(dim - whole // 2))


def widest(dim: int) -> int:
    """Columns of the wider tile of a key."""
    return tiles_of(dim)[0]


def block_for(kind: CacheKind, dim: int) -> int:
    """Keys of one step: a block of the cache, or less where two tiles would not fit a processor's memory."""
    wide = widest(dim)
    if wide > 256:
        return 16
    return 64 if wide <= (64 if kind == "float32" else 128) else 32


def stages(kind: CacheKind, dim: int) -> int:
    """Blocks of keys that are on their way at once, as far as there is memory for them."""
    if kind == "float32":
        return 2 if widest(dim) <= 128 else 1
    return 3


def workspace(rows: int, heads: Heads, splits: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Room for splits' results, (rows, heads, splits, value_dim) and (rows, heads, splits, 2); None for one split."""
    if splits == 1:
        return None
    lead = (rows, heads.queries, splits)
    return torch.empty((*lead, heads.values), device=device), torch.empty((*lead, 2), device=device)


def attend(
    q: Tensor,
    store: Store,
    layer: int,
    kind: CacheKind,
    heads: Heads,
    places: Places,
    splits: int,
    sharing: int = 1,
    out: Tensor | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax attention of T rows: q (T, heads, dim) float32 contiguous → (T, heads, value_dim) likewise, into `out`
    where it is given.

    splits   launched; a row beyond the last of them becomes NaN. No other bit depends on it.
    sharing  how many adjacent rows one request has, most of the time: they read its keys once. For speed alone.
    room     of `workspace`, made here where it is None.

    dim is at most 1024. Against the product in float64, where a row's scores are |s| ≤ S in units of
    e: the error is below (2e-6 + 5e-7·S)·max|v|, the step of the scores' and the weights' rounding to 22 bits, and
    6e-7·c·max|v| more where scores are capped at c.
    """
    rows, count, dim = q.shape
    out = q.new_empty((rows, count, heads.values)) if out is None else out
    if rows == 0:
        return out
    shape = shape_for(count, dim, kind, heads, TILE, sharing)
    if splits > 1 and room is None:
        room = workspace(rows, heads, splits, q.device)
    mixed, sums = (out, out) if room is None else room
    tail = places.tail
    if tail is not None and not tail.shape[1]:
        tail = None
    assert heads.factor is None or kind not in FLOATS
    split_kernel[(triton.cdiv(rows, shape.tile_rows), heads.kv * shape.chunks, splits)](
        q, out, mixed, sums, layer_parts(store, layer, kind), heads.factor, heads.sinks,
        (places.table, places.request, places.position, places.start, places.start if tail is None else tail),
        rows, places.table.shape[1], 1 if tail is None else tail.shape[1], splits, heads.scaling / math.log(2.0),
        SHAPE=shape, TREE=tail is not None, ALONE=splits == 1,
        num_warps=_WARPS, num_stages=stages(kind, dim), enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows, count)](
            mixed, sums, out, heads.sinks, places.position, splits, HEADS=count, DIM=heads.values,
            PADDED=padded(heads.values), WINDOW=heads.window or 0, CHUNKED=heads.chunked, AT_ONCE=_AT_ONCE,
            num_warps=1 if heads.values <= 256 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
