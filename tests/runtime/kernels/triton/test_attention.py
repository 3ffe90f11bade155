"""Attention over all kinds of caches: the reference's numbers, and bits that only a row and its keys decide."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from runtime.cache.quantizer import CacheFormat
from runtime.contract import CacheKind
from runtime.kernels.triton.attention_decode import Heads, Places, attend
from runtime.kernels.triton.attention_prefill import attend_many
from runtime.kernels.triton.attention_splits import FAR, NEAR, NEAR_SPLITS, splits_for
from runtime.kv_store import KEY_BLOCK, Store, allocate
from tests.slices import often

KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4", "int3")
LAYERS = 2
SPLIT = NEAR.value


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Case:
    """A store with `length` slots of each request in shuffled pages, and what they hold as float32 (slots, kv, d)."""

    kind: CacheKind
    heads: Heads
    store: Store
    table: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make(
    device: torch.device,
    kind: CacheKind,
    lengths: tuple[int, ...],
    queries: int = 2,
    kv: int = 1,
    dim: int = 24,
    window: int | None = None,
    seed: int = 0,
    pages: int | None = None,
    value_dim: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Case:
    """Layer 1 holds random keys and values; keys have strong and weak channels, evened out by factors if rounded."""
    of_value = dim if value_dim is None else value_dim
    g = generator(seed)
    blocks = [-(-length // KEY_BLOCK) for length in lengths]
    total = sum(blocks) + 3 if pages is None else pages
    order = torch.randperm(total, generator=g)[: sum(blocks)]
    spread = torch.logspace(-1, 1, dim).repeat(LAYERS, kv, 1) if kind in ("int8", "int4", "int3") else None
    quantizer = CacheFormat(LAYERS, kv, dim, torch.device("cpu"), kind, spread, of_value)
    store = allocate(kind, LAYERS, total, kv, dim, torch.device("cpu"), of_value)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    keys, values = [], []
    for i, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine, order = order[:count], order[count:]
        table[i, :count] = mine
        # Each request's numbers are its own, whatever the others are.
        own = generator(1000 * seed + i + 1)
        k, v = (torch.randn(length, kv, size, generator=own) for size in (dim, of_value))
        slots = torch.arange(length)
        physical = mine[slots // KEY_BLOCK] * KEY_BLOCK + slots % KEY_BLOCK
        quantizer.write(store, 1, physical, k if spread is None else k * spread[1], v)
        held_k, held_v = quantizer.read(store, 1, mine)
        keys.append(held_k.permute(0, 3, 1, 2).flatten(0, 1)[:length])
        values.append(held_v.permute(0, 2, 1, 3).flatten(0, 1)[:length, :, :of_value])
    factor = None if spread is None else spread[1].to(device)
    beside = torch.randn(queries, generator=g).to(device) * 2 if sinks else None
    heads = Heads(queries, kv, dim, dim**-0.5, window, factor, False, value_dim, softcap, beside)
    on = Store(*(part.to(device) for part in (store.keys, store.values, store.key_scale, store.value_scale)))
    return Case(kind, heads, on, table.to(device), keys, values)


def run(
    case: Case,
    q: Tensor,
    request: Tensor,
    position: Tensor,
    splits: int | None = None,
    sharing: int = 1,
    start: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """Attention of rows on the case's device; `splits` None: by the kernel for many rows."""
    device = case.table.device
    start = torch.zeros_like(position) if start is None else start
    ints = [x.to(device, torch.int32) for x in (request, position, start)]
    places = Places(case.table, *ints, None if tail is None else tail.to(device, torch.int32))
    q = q.to(device).contiguous()
    if splits is None:
        return attend_many(q, case.store, 1, case.kind, case.heads, places).cpu()
    return attend(q, case.store, 1, case.kind, case.heads, places, splits, sharing=sharing).cpu()


def expected(case: Case, q: Tensor, request: Tensor, slots: list[Tensor]) -> Tensor:
    """In float64: row t sees the given slots of its request, in order."""
    out = []
    for row, mine in zip(q.double(), slots, strict=True):
        i = int(request[len(out)])
        if case.heads.window is not None:
            mine = mine[-case.heads.window :]
        k, v = case.keys[i][mine].double(), case.values[i][mine].double()
        group = case.heads.queries // case.heads.kv
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", row * case.heads.scaling, k)
        if cap := case.heads.softcap:
            scores = cap * (scores / cap).tanh()
        if (sinks := case.heads.sinks) is not None:
            scores = torch.cat((scores, sinks.cpu().double().unsqueeze(1)), dim=1)
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(mine)], v))
    return torch.stack(out)


def chain(case: Case, q: Tensor, request: Tensor, position: Tensor) -> Tensor:
    return expected(case, q, request, [torch.arange(int(p) + 1) for p in position])


def bound(case: Case, q: Tensor) -> float:
    """What `attend` promises: scores are at most |q||k| · scaling, before they are capped."""
    longest = max(float(k.norm(dim=-1).max()) for k in case.keys)
    largest = max(float(v.abs().max()) for v in case.values)
    scores = longest * float(q.norm(dim=-1).max()) * case.heads.scaling
    return (2e-6 + 5e-7 * scores + 6e-7 * case.heads.softcap) * largest


def queries(count: int, case: Case, seed: int = 5) -> Tensor:
    return torch.randn(count, case.heads.queries, case.heads.dim, generator=generator(seed)) * 2


@pytest.mark.parametrize(
    ("kind", "heads", "kv", "dim"),
    [
        *((kind, 4, 2, 24) for kind in KINDS),
        ("float32", 18, 1, 8),
        ("float16", 3, 1, 64),
        ("int8", 1, 1, 136),
        ("int4", 2, 2, 72),
    ],
)
def test_against_float64(device: torch.device, kind: CacheKind, heads: int, kv: int, dim: int) -> None:
    """Shapes: odd groups, more heads a key than a tile holds, dimensions of no power of two, and beyond 128."""
    case = make(device, kind, (1, 150), heads, kv, dim)
    request, position = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 63, 140, 149])
    q = queries(4, case)
    want = chain(case, q, request, position)
    got = run(case, q, request, position, splits=3, sharing=4)
    assert float((got - want).abs().max()) < bound(case, q)
    assert torch.equal(run(case, q, request, position), got)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_large_scores_and_values(device: torch.device, kind: CacheKind) -> None:
    """One key takes nearly all the weight, and single channels are a hundred times the others."""
    case = make(device, kind, (140,), seed=1)
    case.store.values.mul_(100) if kind.startswith("float") else case.store.value_scale.mul_(100)
    loud = replace(case, values=[100 * v for v in case.values])
    q = queries(2, case) * torch.logspace(0, 2, case.heads.dim)
    request, position = torch.zeros(2, dtype=torch.int64), torch.tensor([139, 100])
    got = run(loud, q, request, position, splits=3)
    assert float((got - chain(loud, q, request, position)).abs().max()) < bound(loud, q)


# Bits: of a row and its keys alone.


@pytest.mark.parametrize("kind", often(KINDS, "int4"))
def test_bits_at_every_width_and_in_both_kernels(device: torch.device, kind: CacheKind) -> None:
    """Sixteen rows of a chain over the border of a split, in launches of any width, however many share a tile."""
    case = make(device, kind, (SPLIT + 8,))
    request, position = torch.zeros(16, dtype=torch.int64), torch.arange(SPLIT - 8, SPLIT + 8)
    q = queries(16, case)
    whole = run(case, q, request, position)
    # The interpreter is slow, and the order of operations is one for all kinds.
    for width in range(1, 17) if kind == "int8" else (1, 5):
        part = slice(16 - width, 16)
        assert torch.equal(run(case, q[part], request[part], position[part], 2, sharing=5 * width), whole[part])
    # Beyond what a row needs, nothing changes; below it, the row says so.
    assert torch.equal(run(case, q, request, position, splits=5, sharing=3), whole)
    short = run(case, q, request, position, splits=1)
    assert torch.equal(short[:8], whole[:8]) and bool(short[8:].isnan().all())


@pytest.mark.parametrize("kind", often(["float16", "int4"], "int4"))
def test_neighbours_and_pages_change_no_bit(device: torch.device, kind: CacheKind) -> None:
    """A batch whose tiles hold rows of three requests, one of them with numbers that are none, and empty rows."""
    case, other = (make(device, kind, (70, 5, 130), pages=pages) for pages in (6, 11))
    assert not torch.equal(case.table, other.table)
    request = torch.tensor([0, 0, 1, 2, 2, 2])
    position = torch.tensor([60, 69, 4, 127, -1, 129])
    q = queries(6, case)
    alone = torch.cat([run(case, q[i : i + 1], request[i : i + 1], position[i : i + 1], 3) for i in range(6)])
    assert not alone[4].any() and bool(alone.isfinite().all())
    for sharing in (1, 8):
        assert torch.equal(run(other, q, request, position, 4, sharing), alone)
    assert torch.equal(run(other, q, request, position), alone)
    ill = q.clone()
    ill[2] = torch.nan
    got = run(case, ill, request, position, 3, sharing=8)
    assert bool(got[2].isnan().all()) and torch.equal(got[[0, 1, 3, 4, 5]], alone[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(("kind", "window"), [("float32", None), ("int4", None), ("int8", 40)])
def test_a_trees_rows_are_those_of_their_chains(device: torch.device, kind: CacheKind, window: int | None) -> None:
    """Request 1 holds in order what is a path of the tree in request 0, whose tail goes over a block's border."""
    length, parents = 58, [-1, 0, 0, 1, 2, 3, 3, 5, 7, 8]
    case = make(device, kind, (length + 10, length + 10), window=window)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    position = torch.tensor([length + len(path) - 1 for path in paths])
    tail = torch.zeros(10, 12, dtype=torch.int64)
    for row, path in enumerate(paths):
        tail[row, : len(path)] = torch.tensor(path) + length
    request, start, q = torch.zeros(10, dtype=torch.int64), torch.full((10,), length), queries(10, case)
    slots = [torch.cat((torch.arange(length), torch.tensor(path) + length)) for path in paths]
    want = expected(case, q, request, slots)
    trees = {sharing: run(case, q, request, position, 2, sharing, start, tail) for sharing in (1, 8)}
    assert float((trees[1] - want).abs().max()) < bound(case, q)
    assert torch.equal(trees[8], trees[1])
    # The same keys and values as a chain, for the longest path, moved together.
    page, inside = case.table.cpu()[0].long(), slots[-1]
    physical = page[inside // KEY_BLOCK] * KEY_BLOCK + inside % KEY_BLOCK
    order = torch.arange(len(inside))
    parts = (case.store.keys, case.store.values, case.store.key_scale, case.store.value_scale)
    moved = Store(*(part.cpu().clone() for part in parts))
    target = page[order // KEY_BLOCK] * KEY_BLOCK + order % KEY_BLOCK
    form = CacheFormat(LAYERS, *moved.keys.shape[2:4], torch.device("cpu"), kind)
    form.move(moved, physical, target)
    parts = (moved.keys, moved.values, moved.key_scale, moved.value_scale)
    straight = replace(case, store=Store(*(part.to(device) for part in parts)))
    row = slice(9, 10)
    assert torch.equal(run(straight, q[row], request[row], position[row], 2), trees[1][row])


def test_far_splits(device: torch.device) -> None:
    """Rows around the border of the short splits, and of the first long ones."""
    border = SPLIT * NEAR_SPLITS.value
    assert [
        splits_for(n) for n in (1, SPLIT, SPLIT + 1, border, border + 1, border + FAR.value, border + 1 + FAR.value)
    ] == [*(1, 1, 2, 16, 17, 17, 18)]
    case = make(device, "int8", (border + FAR.value + 9,), 2, 1, 16)
    position = torch.tensor([border - 1, border, border + FAR.value - 1, border + FAR.value + 8])
    request, q = torch.zeros(4, dtype=torch.int64), queries(4, case)
    got = run(case, q, request, position, 18, sharing=4)
    assert float((got - chain(case, q, request, position)).abs().max()) < bound(case, q)
    assert torch.equal(run(case, q, request, position), got)
    for row, splits in ((0, 16), (1, 17), (3, 20)):
        one = slice(row, row + 1)
        assert torch.equal(run(case, q[one], request[one], position[one], splits), got[one])
    short = run(case, q, request, position, 17)
    assert torch.equal(short[:3], got[:3]) and bool(short[3].isnan().all())


@pytest.mark.parametrize(("kind", "window"), [("float16", 33), ("int8", 130)])
def test_windows(device: torch.device, kind: CacheKind, window: int) -> None:
    """Rows that see part of a block, of a split, or neither of the first ones."""
    case = make(device, kind, (200,), window=window)
    position = torch.tensor([0, 31, 63, 64, 128, 199])
    request, q = torch.zeros(6, dtype=torch.int64), queries(6, case)
    got = run(case, q, request, position, 4, sharing=8)
    assert float((got - chain(case, q, request, position)).abs().max()) < bound(case, q)
    assert torch.equal(run(case, q, request, position), got)
    alone = [run(case, q[i : i + 1], request[:1], position[i : i + 1], 4) for i in (1, 3, 5)]
    assert torch.equal(torch.cat(alone), got[1::2])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, KEY_BLOCK, SPLIT, 2 * SPLIT]),
    st.integers(-1, 1),
    st.integers(1, 6),
    st.sampled_from([(1, 1), (5, 1), (4, 4), (6, 2)]),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([None, 50]),
)
def test_shapes(
    kind: CacheKind, near: int, off: int, count: int, heads: tuple[int, int], dim: int, window: int | None
) -> None:
    """Lengths around blocks and splits, rows of every width, groups and windows of every kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = max(near + off, 1)
    case = make(device, kind, (length,), *heads, dim, window)
    count = min(count, length)
    request, position = torch.zeros(count, dtype=torch.int64), torch.arange(length - count, length)
    q = queries(count, case, seed=length)
    splits = splits_for(length)
    got = run(case, q, request, position, splits, sharing=count)
    assert float((got - chain(case, q, request, position)).abs().max()) < bound(case, q)
    assert torch.equal(run(case, q, request, position), got)
