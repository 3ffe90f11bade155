"""Attention over all kinds of caches: the reference's numbers, and bits that only a row and its keys decide."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from runtime.kernels.reference import KEY_BLOCK
from runtime.kernels.triton.attention import SPLIT, Heads, Places, attend, splits_for
from runtime.kv import Quantizer, Store, allocate
from runtime.kv_kind import CacheKind

KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4")
LAYERS = 2


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
    queries: int = 4,
    kv: int = 2,
    dim: int = 24,
    window: int | None = None,
    seed: int = 0,
    pages: int | None = None,
) -> Case:
    """Layer 1 holds random keys and values; keys have strong and weak channels, evened out by factors if rounded."""
    g = generator(seed)
    blocks = [-(-length // KEY_BLOCK) for length in lengths]
    total = sum(blocks) + 3 if pages is None else pages
    order = torch.randperm(total, generator=g)[: sum(blocks)]
    spread = torch.logspace(-1, 1, dim).repeat(LAYERS, kv, 1) if kind in ("int8", "int4") else None
    quantizer = Quantizer(kind, spread)
    store = allocate(kind, LAYERS, total, kv, dim, torch.device("cpu"))
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    keys, values = [], []
    for i, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine, order = order[:count], order[count:]
        table[i, :count] = mine
        # Each request's numbers are its own, whatever the others are.
        own = generator(1000 * seed + i + 1)
        k, v = torch.randn(2, length, kv, dim, generator=own)
        slots = torch.arange(length)
        physical = mine[slots // KEY_BLOCK] * KEY_BLOCK + slots % KEY_BLOCK
        quantizer.write(store, 1, physical, k if spread is None else k * spread[1], v)
        held_k, held_v = quantizer.read(store, 1, mine)
        keys.append(held_k.permute(0, 3, 1, 2).flatten(0, 1)[:length])
        values.append(held_v.permute(0, 2, 1, 3).flatten(0, 1)[:length, :, :dim])
    heads = Heads(queries, kv, dim, dim**-0.5, window, None if spread is None else spread[1].to(device))
    on = Store(*(part.to(device) for part in (store.keys, store.values, store.key_scale, store.value_scale)))
    return Case(kind, heads, on, table.to(device), keys, values)


def run(case: Case, q: Tensor, request: Tensor, position: Tensor, splits: int = 0, sharing: int = 1, tail=None, start=None):  # type: ignore[no-untyped-def] # fmt: skip
    """Attention of rows on the case's device, as CPU tensors."""
    device = case.table.device
    start = torch.zeros_like(position) if start is None else start
    ints = [x.to(device, torch.int32) for x in (request, position, start)]
    places = Places(case.table, *ints, None if tail is None else tail.to(device, torch.int32))
    splits = splits or splits_for(int(position.max()) + 1)
    return attend(
        q.to(device).contiguous(), case.store, 1, case.kind, case.heads, places, splits, sharing=sharing
    ).cpu()  # fmt: skip


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
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack(out)


def chain(case: Case, q: Tensor, request: Tensor, position: Tensor) -> Tensor:
    return expected(case, q, request, [torch.arange(int(p) + 1) for p in position])


def bound(case: Case, q: Tensor) -> float:
    """What `attend` promises: scores are at most |q||k| · scaling."""
    longest = max(float(k.norm(dim=-1).max()) for k in case.keys)
    largest = max(float(v.abs().max()) for v in case.values)
    return (2e-6 + 5e-7 * longest * float(q.norm(dim=-1).max()) * case.heads.scaling) * largest


def queries(count: int, case: Case, seed: int = 5) -> Tensor:
    return torch.randn(count, case.heads.queries, case.heads.dim, generator=generator(seed)) * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv", "dim"), [(4, 2, 24), (3, 1, 64), (18, 1, 8), (2, 2, 136)])
def test_against_float64(device: torch.device, kind: CacheKind, heads: int, kv: int, dim: int) -> None:
    """Shapes: odd groups, more heads a key than a tile holds, dimensions of no power of two, and beyond 128."""
    case = make(device, kind, (1, 150), heads, kv, dim)
    request, position = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 63, 140, 149])
    q = queries(4, case)
    got = run(case, q, request, position, sharing=4)
    assert float((got - chain(case, q, request, position)).abs().max()) < bound(case, q)
