"""Rows into the cache on the device: the memory that quantizer.CacheFormat writes, bit for bit."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.cache.quantizer import CacheFormat
from runtime.contract import CacheBasis, CacheKind
from runtime.kernels import reference
from runtime.kernels.basis import BACK, turned
from runtime.kernels.triton.basis import turn_back
from runtime.kernels.triton.kv_store import move
from runtime.kernels.triton.rotary import rotate_and_store
from runtime.kv_store import Store, allocate
from tests.slices import often

KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4", "int3")
LAYERS, BLOCKS, HEADS = 2, 3, 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty(kind: CacheKind, dim: int) -> Store:
    return allocate(kind, LAYERS, BLOCKS, HEADS, dim, torch.device("cpu"))


def on(device: torch.device, store: Store) -> Store:
    return Store(*(part.clone().to(device) for part in parts(store)))


def parts(store: Store) -> tuple[Tensor, ...]:
    return store.keys, store.values, store.key_scale, store.value_scale


def same(ours: Store, theirs: Store) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(parts(ours), parts(theirs), strict=True))


def form(kind: CacheKind, dim: int, factor: Tensor | None = None) -> CacheFormat:
    return CacheFormat(LAYERS, HEADS, dim, torch.device("cpu"), kind, factor)


def factor_for(kind: CacheKind, dim: int) -> Tensor | None:
    return None if kind.startswith("float") else normal(LAYERS, HEADS, dim, seed=9).abs() + 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [8, 24, 64, 72])
def test_rows_are_stored_as_the_quantizer_does(device: torch.device, kind: CacheKind, dim: int) -> None:
    """Two launches over the same slots, whose second must leave nothing of the first; j and j + 32 at once."""
    theirs = empty(kind, dim)
    ours = on(device, theirs)
    factor = factor_for(kind, dim)
    quantizer = form(kind, dim, factor)
    for seed, slots in ((1, [0, 32, 63, 31, 64, 191, 100]), (2, [32, 0, 1, 33, 100])):
        keys, values = normal(2, len(slots), HEADS, dim, seed=seed)
        values[0] = 0.0
        at = torch.tensor(slots)
        quantizer.write(theirs, 1, at, keys, values)
        mine = None if factor is None else factor[1].to(device)
        # Rotated by nothing: the numbers as they are.
        k, v, none = keys.to(device).flatten(1), values.to(device).flatten(1), torch.zeros(1, 1, device=device)
        where, first = at.to(device, torch.int32), torch.zeros(len(slots), dtype=torch.int32, device=device)
        rotate_and_store(k[:, :dim], k, v, none + 1, none, first, where, ours, 1, kind, dim, mine)
        assert same(ours, theirs)
    assert theirs.keys[1].any() and not ours.keys[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_other_dimensions_than_keys(device: torch.device, kind: CacheKind) -> None:
    """And a layer that reads another's: its queries are rotated, and nothing is stored."""
    dim, value_dim, slots = 20, 13, torch.tensor([0, 70, 33])
    factor = factor_for(kind, dim)
    theirs = allocate(kind, LAYERS, BLOCKS, HEADS, dim, torch.device("cpu"), value_dim)
    ours = on(device, theirs)
    keys, values = normal(3, HEADS, dim, seed=1), normal(3, HEADS, value_dim, seed=2)
    CacheFormat(LAYERS, HEADS, dim, torch.device("cpu"), kind, factor, value_dim).write(theirs, 1, slots, keys, values)
    q, (cos, sin) = normal(3, 4 * dim, seed=3), normal(2, 9, dim // 2, seed=4)
    mine = None if factor is None else factor[1].to(device)
    still, first = torch.zeros(1, 0, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    k, v = keys.to(device).flatten(1), values.to(device).flatten(1)
    where = slots.to(device, torch.int32)
    rotate_and_store(k[:, :dim], k, v, still, still, first, where, ours, 1, kind, dim, mine)
    assert same(ours, theirs)
    at, none = torch.tensor([8, 0, 3], dtype=torch.int32, device=device), k[:, :0]
    turned = (q.to(device), none, none, cos.to(device), sin.to(device), at)
    got = rotate_and_store(*turned, where, ours, 0, kind, dim, mine)
    assert torch.equal(got.cpu(), reference.rotate(q.view(3, 4, dim), cos[at.cpu().long()], sin[at.cpu().long()]))
    assert same(ours, theirs) and theirs.keys[1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("source", "target"), [([5], [2]), ([1, 4, 5, 9, 70], [0, 1, 2, 3, 4]), ([9, 0, 3, 1, 40], [0, 1, 2, 3, 8])]
)
def test_moves(device: torch.device, kind: CacheKind, source: list[int], target: list[int]) -> None:
    theirs, quantizer = empty(kind, 24), form(kind, 24)
    for layer in range(LAYERS):
        quantizer.write(theirs, layer, torch.arange(80), *normal(2, 80, HEADS, 24, seed=layer))
    ours = on(device, theirs)
    quantizer.move(theirs, torch.tensor(source), torch.tensor(target))
    # A pair that is left out.
    a, b = (
        torch.tensor([*slots, last], dtype=torch.int32, device=device) for slots, last in ((source, 7), (target, -1))
    )
    move(ours, kind, a, b)
    assert same(ours, theirs)


@pytest.mark.parametrize(
    "case",
    often([(k, *dims) for k in ("int4", "int3") for dims in ((24, 24), (7, 20))], ("int4", 7, 20), ("int3", 24, 24)),
)
def test_rows_in_a_basis(device: torch.device, case: tuple[CacheKind, int, int]) -> None:
    """Codes that make up for each other, NaN and zeros among the rows; and what comes back."""
    kind, dim, value_dim = case
    bases = [normal(LAYERS, HEADS, 3, size, size, seed=size) * 0.2 for size in (dim, value_dim)]
    basis, slots = CacheBasis(*bases), torch.tensor([0, 32, 63, 31, 70])
    theirs = allocate(kind, LAYERS, BLOCKS, HEADS, dim, torch.device("cpu"), value_dim)
    ours = on(device, theirs)
    keys, values = normal(5, HEADS, dim, seed=1), normal(5, HEADS, value_dim, seed=2)
    keys[0], values[1, 1], values[2, 0, 3] = 0.0, 0.0, torch.nan
    cache = CacheFormat(LAYERS, HEADS, dim, torch.device("cpu"), kind, None, value_dim, basis=basis)
    cache.write(theirs, 1, slots, keys, values)
    own = CacheBasis(*(part[1].to(device) for part in bases))
    still, first = torch.zeros(1, 0, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    k, v, where = keys.to(device).flatten(1), values.to(device).flatten(1), slots.to(device, torch.int32)
    rotate_and_store(k[:, :dim], k, v, still, still, first, where, ours, 1, kind, dim, basis=own)
    assert all(
        torch.equal(a.cpu().nan_to_num(), b.nan_to_num()) for a, b in zip(parts(ours), parts(theirs), strict=True)
    )
    assert theirs.value_scale[1].isnan().any() and theirs.keys[1].any()
    x = normal(3, 2 * HEADS, dim, seed=3)
    assert torch.equal(turn_back(x.to(device), own.keys).cpu(), turned(x, bases[0][1, :, BACK]))


def test_too_many_moves_are_refused(device: torch.device) -> None:
    slots = torch.arange(65, device=device)
    with pytest.raises(ValueError, match="at most 64"):
        move(on(device, empty("int8", 8)), "int8", slots, slots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotated", "normed"), [(24, 24, True), (40, 16, False), (64, 64, False)])
def test_rotation_and_storing(device: torch.device, kind: CacheKind, dim: int, rotated: int, normed: bool) -> None:
    heads, count = 4, 5
    whole = normal(count, (heads + 2 * HEADS) * dim, seed=3)
    q, k, v = whole.split([heads * dim, HEADS * dim, HEADS * dim], dim=1)
    table = normal(50, rotated // 2, seed=4)
    cos, sin = table.cos(), table.sin()
    position, slots = torch.tensor([3, 4, 4, 49, 0]), torch.tensor([67, 68, 100, 2, 34])
    q_norm, k_norm = normal(2, dim, seed=5) if normed else (None, None)
    want_q, want_k = q.reshape(count, heads, dim), k.reshape(count, HEADS, dim)
    if normed:
        want_q, want_k = reference.rms_norm(want_q, q_norm, 1e-6), reference.rms_norm(want_k, k_norm, 1e-6)
    want_q = reference.rotate(want_q, cos[position], sin[position])
    want_k = reference.rotate(want_k, cos[position], sin[position])
    theirs, factor = empty(kind, dim), factor_for(kind, dim)
    ours = on(device, theirs)
    form(kind, dim, factor).write(theirs, 1, slots, want_k, v.reshape(count, HEADS, dim))
    there = whole.to(device)
    got = rotate_and_store(
        *there.split([heads * dim, HEADS * dim, HEADS * dim], dim=1),
        cos.to(device),
        sin.to(device),
        position.to(device, torch.int32),
        slots.to(device, torch.int32),
        ours,
        1,
        kind,
        dim,
        None if factor is None else factor[1].to(device),
        None if q_norm is None else q_norm.to(device),
        None if k_norm is None else k_norm.to(device),
        1e-6,
    )
    assert torch.equal(got.cpu(), want_q) and same(ours, theirs)
