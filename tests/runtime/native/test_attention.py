"""Native attention against float64 over what the cache holds, and its bits whatever shares the call."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.kernels import reference
from runtime.kv_store import CacheKind
from runtime.native.binding import CACHES, PATHS, pool, require
from runtime.native.structs import BatchStruct, HeadsStruct, StoreStruct

KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4", "int3")
LAYERS, LAYER = 2, 1
# (query heads to a key head, key heads, head dimension): everything that units and vectors are cut by.
SHAPES = [(1, 2, 64), (2, 2, 16), (7, 1, 48), (8, 2, 80), (12, 1, 64), (3, 1, 20)]
# Both sides of a block of 64 keys and of a split of 512.
POSITIONS = [0, 1, 15, 62, 63, 64, 65, 127, 300, 511, 512, 513, 575, 1023, 1024, 1299]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Keys:
    """A cache of one request, and how it is asked."""

    cache: ContiguousCache
    request: int
    per_kv: int

    @property
    def heads(self) -> int:
        return self.cache.format.kv_heads * self.per_kv


def keys(
    kind: CacheKind, per_kv: int, kv_heads: int, dim: int, tokens: int = 1300, seed: int = 0, factor: bool = False
) -> Keys:
    g = generator(seed)
    by = torch.rand(LAYERS, kv_heads, dim, generator=g) * 2 + 0.1 if factor else None
    cache = ContiguousCache(CacheFormat(LAYERS, kv_heads, dim, torch.device("cpu"), kind, by))
    request = cache.open(tokens)
    start = cache.reserve(request, tokens)
    for layer in range(LAYERS):
        cache.write(layer, request, start, *torch.randn(2, tokens, kv_heads, dim, generator=g))
    return Keys(cache, request, per_kv)


def attend(
    path: str,
    held: Sequence[Keys],
    queries: Sequence[Tensor],
    positions: Sequence[Sequence[int]],
    window: int = 0,
    threads: int = 1,
    tail: Sequence[int] = (),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Rows of several requests in one call: per request queries (rows, heads, dim) and the last key of each row.

    `tail`: the slots of the last keys, in order of position, where there is one row in all.
    """
    cache = held[0].cache
    counts = [len(p) for p in positions]
    q = torch.cat(list(queries)).contiguous()
    at = np.concatenate([np.array(p, dtype=np.int64) for p in positions])
    request = np.repeat(np.arange(len(held), dtype=np.int64), counts)
    zeros, tail_at = np.zeros(len(at), dtype=np.int64), np.full(len(at), 0 if tail else -1, dtype=np.int64)
    tail_from, slots = at + 1 - len(tail), np.array([*tail, 0], dtype=np.int64)
    stores = (StoreStruct * len(held))(*[StoreStruct(*k.cache.store(k.request).pointers) for k in held])
    arrays = [zeros, request, at, at, tail_from, tail_at, slots]
    batch = BatchStruct(len(at), *[a.ctypes.data for a in arrays], stores)
    factor = cache.format.key_factor
    heads = HeadsStruct(
        held[0].heads,
        cache.format.kv_heads,
        cache.format.head_dim,
        0,
        CACHES[cache.format.kind],
        None if factor is None else factor.data_ptr(),
    )
    out = torch.empty_like(q)
    require().specpress_attend(
        PATHS[path],
        pool(threads).handle,
        byref(heads),
        LAYER,
        window,
        cache.format.head_dim**-0.5,
        softcap,
        None if sinks is None else sinks.data_ptr(),
        byref(batch),
        q.data_ptr(),
        out.data_ptr(),
    )
    return list(out.split(counts))


def one(path: str, held: Keys, queries: Tensor, positions: Sequence[int], window: int = 0, threads: int = 1) -> Tensor:
    return attend(path, [held], [queries], [positions], window, threads)[0]


def expected(held: Keys, queries: Tensor, positions: Sequence[int], window: int = 0) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64 over the cache as it is read back, and Σ weight · |value|."""
    dim = held.cache.format.head_dim
    k, v = (
        part.transpose(1, 2).flatten(0, 1).double() for part in held.cache.read(LAYER, held.request, max(positions) + 1)
    )
    want, bound = torch.empty(queries.shape, dtype=torch.float64), torch.empty(queries.shape, dtype=torch.float64)
    for row, last in enumerate(positions):
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        q = queries[row].double().view(held.cache.format.kv_heads, held.per_kv, dim)
        odds = torch.softmax(torch.einsum("hqd,khd->hqk", q, k[seen]) * dim**-0.5, -1)
        want[row] = torch.einsum("hqk,khd->hqd", odds, v[seen]).flatten(0, 1)
        bound[row] = torch.einsum("hqk,khd->hqd", odds, v[seen].abs()).flatten(0, 1)
    return want, bound


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference_bit_for_bit(native_path: str, kind: CacheKind) -> None:
    held = keys(kind, *SHAPES[0], factor=kind != "float32")
    queries = torch.randn(len(POSITIONS), held.heads, SHAPES[0][2], generator=generator(1))
    stored = (part.unsqueeze(0) for part in held.cache.read(LAYER, held.request, max(POSITIONS) + 1))
    blocks, last = tuple(stored), torch.tensor([POSITIONS])
    for window in (0, 40, 600):
        want = reference.attention(queries.unsqueeze(0), *blocks, last, SHAPES[0][2] ** -0.5, window or None)
        assert torch.equal(one(native_path, held, queries, POSITIONS, window), want[0]), window


@pytest.mark.parametrize("kind", KINDS)
def test_capped_scores_and_sinks_are_the_references(native_path: str, kind: CacheKind) -> None:
    held = keys(kind, *SHAPES[0], factor=kind != "float32")
    queries = torch.randn(len(POSITIONS), held.heads, SHAPES[0][2], generator=generator(1)) * 3
    stored = (part.unsqueeze(0) for part in held.cache.read(LAYER, held.request, max(POSITIONS) + 1))
    blocks, last = tuple(stored), torch.tensor([POSITIONS])
    sinks = torch.randn(held.heads, generator=generator(2)) * 3
    plain = attend(native_path, [held], [queries], [POSITIONS], 40)[0]
    for cap, own in ((1.5, None), (0.0, sinks), (2.5, sinks)):
        want = reference.attention(queries.unsqueeze(0), *blocks, last, SHAPES[0][2] ** -0.5, 40, cap, own)[0]
        got = attend(native_path, [held], [queries], [POSITIONS], 40, softcap=cap, sinks=own)[0]
        assert torch.equal(got, want) and not torch.equal(got, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64_within_a_bound(native_path: str, kind: CacheKind, shape: tuple[int, int, int]) -> None:
    held = keys(kind, *shape, factor=kind != "float32" and shape[0] % 2 == 0)
    queries = torch.randn(len(POSITIONS), held.heads, shape[2], generator=generator(1))
    for window in (0, 1, 40, 64, 600, 5000):
        got = one(native_path, held, queries, POSITIONS, window)
        want, bound = expected(held, queries, POSITIONS, window)
        assert ((got.double() - want).abs() <= 1e-5 * bound).all(), window
    if kind != "float32":
        # What is compared with matters: the values before rounding are further away.
        plain = keys("float32", *shape)
        assert not torch.allclose(got.double(), expected(plain, queries, POSITIONS)[0], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sharp_and_flat_weights(native_path: str, kind: CacheKind) -> None:
    held = keys(kind, 2, 1, 64)
    for scale in (0.0, 1e-3, 30.0):
        queries = torch.randn(len(POSITIONS), 2, 64, generator=generator(2)) * scale
        got = one(native_path, held, queries, POSITIONS)
        want, bound = expected(held, queries, POSITIONS)
        # A score's error grows with it, and is a relative error of its weight.
        assert ((got.double() - want).abs() <= 1e-5 * max(1.0, scale) * bound).all(), scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2, 64), (2, 1, 16), (7, 1, 48), (12, 1, 20)])
def test_bits_at_every_width_and_on_any_threads(native_path: str, kind: CacheKind, shape: tuple[int, int, int]) -> None:
    held = keys(kind, *shape, tokens=600)
    for first, window in ((0, 0), (505, 0), (505, 40), (60, 100)):
        positions = list(range(first, first + 40))
        queries = torch.randn(40, held.heads, shape[2], generator=generator(first))
        want = one(native_path, held, queries, positions, window)
        assert torch.equal(one(native_path, held, queries, positions, window, threads=2), want)
        alone = torch.cat([one(native_path, held, queries[[i]], positions[i : i + 1], window) for i in range(40)])
        assert torch.equal(alone, want)
        for width in range(2, 17):
            part = slice(width, 2 * width)
            assert torch.equal(one(native_path, held, queries[part], positions[part], window), want[part])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_long_text(native_path: str, kind: CacheKind) -> None:
    """However many there are for however few heads: its splits are added in their order."""
    for shape in [(1, 1, 64), (7, 1, 48), (12, 3, 20)]:
        held = keys(kind, *shape, tokens=2100, factor=kind != "float32")
        short = keys(kind, *shape, tokens=70, factor=kind != "float32")
        queries = torch.randn(3, held.heads, shape[2], generator=generator(1))
        for window in (0, 700):
            want = one(native_path, held, queries, [2000, 2001, 2047], window)
            for threads in (2, 3, 5):
                assert torch.equal(one(native_path, held, queries, [2000, 2001, 2047], window, threads=threads), want)
                assert torch.equal(one(native_path, held, queries[:1], [2000], window, threads=threads), want[:1])
                both = attend(
                    native_path, [short, held], [queries, queries], [[3, 4, 5], [2000, 2001, 2047]], window, threads
                )
                assert torch.equal(both[1], want)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_one_call_do_not_see_each_other(native_path: str, kind: CacheKind) -> None:
    held = [keys(kind, 2, 2, 16, tokens=t, seed=t) for t in (40, 600, 130)]
    positions = [[39], list(range(505, 520)), [0, 1, 2, 127, 128]]
    queries = [torch.randn(len(p), 4, 16, generator=generator(len(p))) for p in positions]
    alone = [one(native_path, *part) for part in zip(held, queries, positions, strict=True)]
    for threads in (1, 2):
        for got, want in zip(attend(native_path, held, queries, positions, threads=threads), alone, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_taken_in_order_of_position_wherever_they_lie(native_path: str, kind: CacheKind) -> None:
    """As a tree has it: the last keys of a row stand in any slots; its bits are those of slots in order."""
    held = keys(kind, 2, 2, 20, tokens=640)
    g = generator(3)
    for length in (3, 70, 600):
        queries = torch.randn(1, 4, 20, generator=g)
        for listed in (1, 2, min(length, 35)):
            order = (torch.randperm(640 - length, generator=g)[:listed] + length).tolist()
            (scattered,) = attend(native_path, [held], [queries], [[length - 1]], tail=order)
            twin = keys(kind, 2, 2, 20, tokens=640)
            where = torch.arange(length - listed, length)
            twin.cache.format.move(twin.cache.store(0), torch.tensor(order), where)
            assert torch.equal(scattered, one(native_path, twin, queries, [length - 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_a_row_does_not_reach_it(native_path: str, kind: CacheKind) -> None:
    """Rows that a rollback left behind, even infinite ones: a row sees keys by position alone."""
    held, twin = keys(kind, 2, 1, 16, tokens=192), keys(kind, 2, 1, 16, tokens=192)
    queries = torch.randn(3, 2, 16, generator=generator(4))
    for value in (1e30, torch.inf, torch.nan):
        held.cache.write(LAYER, held.request, 100, *torch.full((2, 60, 1, 16), value))
        got = one(native_path, held, queries, [97, 98, 99])
        assert torch.equal(got, one(native_path, twin, queries, [97, 98, 99]))
    assert not torch.equal(one(native_path, held, queries[:1], [100]), one(native_path, twin, queries[:1], [100]))


@pytest.mark.parametrize("per_kv", [1, 4])
def test_a_row_never_meets_a_later_rows_infinity(native_path: str, per_kv: int) -> None:
    """Rows of one request share a unit; what a later one stored must not reach the earlier ones, not even times 0."""
    for last in (66, 513):
        held = keys("float32", per_kv, 2, 64, tokens=600)
        positions = list(range(last - 6, last + 2))
        queries = torch.randn(len(positions), held.heads, 64, generator=generator(3))
        want = one(native_path, held, queries, positions)
        held.cache.store(held.request).values[LAYER, last // 64, :, last % 64] = torch.inf
        got = one(native_path, held, queries, positions)
        assert torch.equal(got[:6], want[:6])
        assert not torch.isfinite(got[6:]).any()
