"""What happens to single rows natively: norm, activation, rotation, and what a cache keeps, all bit for bit."""

from ctypes import byref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.checkpoints.record import Activation
from runtime.contract import CacheBasis, CacheKind
from runtime.kernels import reference
from runtime.kernels.activations import activate
from runtime.native.binding import ACTIVATIONS, CACHES, PATHS, require
from runtime.native.structs import HeadsStruct, StoreStruct

SIZES = [1, 2, 15, 16, 17, 48, 63, 64, 65, 100, 512, 1000]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def norm(path: str, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    out = torch.empty_like(x)
    pointers = x.data_ptr(), weight.data_ptr()
    require().specpress_norm(PATHS[path], *pointers, *x.shape, eps, offset, out.data_ptr())
    return out


def gated(path: str, gate: Tensor, up: Tensor | None, kind: str, parameters: Tensor | None = None) -> Tensor:
    out = torch.empty_like(gate)
    factor, own = (None if part is None else part.data_ptr() for part in (up, parameters))
    number = ACTIVATIONS[kind]
    require().specpress_gated(PATHS[path], gate.data_ptr(), factor, gate.numel(), number, own, out.data_ptr())
    return out


def rotate(path: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.clone()
    pointers = cos.data_ptr(), sin.data_ptr()
    require().specpress_rotate(PATHS[path], out.data_ptr(), *x.shape, cos.shape[1], *pointers)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """The same numbers, zeros with the same sign; what is no number equals what is none."""
    zero = a == 0
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and torch.equal(a.signbit()[zero], b.signbit()[zero])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(native_path: str, offset: float) -> None:
    for size in SIZES:
        x, weight = torch.randn(5, size, generator=generator(size)), torch.randn(size, generator=generator(1))
        x[1], x[2], x[3] = 0.0, x[2] * 1e15, x[3] * 1e-20
        for eps in (1e-5, 1e-6):
            got = norm(native_path, x, weight, eps, offset)
            assert torch.equal(got, reference.rms_norm(x, weight, eps, offset)), size


def test_norm_of_extremes(native_path: str) -> None:
    """1e30 squared is infinite: the row becomes zeros, as in the reference; a NaN stays in its row."""
    x = torch.randn(4, 64, generator=generator(2))
    want = norm(native_path, x, torch.ones(64), 1e-5, 0.0)
    x[1], x[2, 7] = 1e30, torch.nan
    got = norm(native_path, x, torch.ones(64), 1e-5, 0.0)
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert same(got, reference.rms_norm(x, torch.ones(64), 1e-5, 0.0))
    assert got[2].isnan().all() and (got[1] == 0).all()


PARAMETERS = {"xielu": torch.tensor([0.7, 0.9, 0.5, -1e-6]), "clamped_swiglu": torch.tensor([1.5, 1.702])}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation(native_path: str, kind: Activation) -> None:
    own = PARAMETERS.get(kind)
    special = torch.tensor(
        [0.0, -0.0, 1e-42, -1e-42, 87.0, -87.3, -87.4, 88.3, 88.4, -1e4, 1e4, 1e12, -1e12, 1e30, -1e30]
    )
    for size in [0, *SIZES]:
        gate, up = torch.randn(2, size, generator=generator(size)) * 6
        assert torch.equal(gated(native_path, gate, up, kind, own), activate(kind, gate, up, own)), size
        if kind != "clamped_swiglu":
            assert torch.equal(gated(native_path, gate, None, kind, own), activate(kind, gate, None, own))
    up = torch.randn(special.shape, generator=generator(3))
    if kind != "xielu":  # whose squares overflow: infinities of either sign add up to what is no number
        assert same(gated(native_path, special, up, kind, own), activate(kind, special, up, own))
    broken = torch.tensor([1.0, torch.nan, 2.0, torch.inf, -torch.inf])
    if kind in ("silu", "gelu_tanh"):
        assert same(gated(native_path, broken, torch.ones(5), kind), activate(kind, broken, torch.ones(5)))


def test_layer_norm(native_path: str) -> None:
    for size in SIZES:
        x, weight, bias = (torch.randn(n, size, generator=generator(size + n)) for n in (5, 1, 2))
        x[1], x[2] = 0.0, x[2] * 1e15 + 1e16
        for own in (None, bias[0].contiguous()):
            out = torch.empty_like(x)
            address = None if own is None else own.data_ptr()
            pointers = x.data_ptr(), weight.data_ptr(), address
            require().specpress_layer_norm(PATHS[native_path], *pointers, *x.shape, 1e-5, out.data_ptr())
            assert torch.equal(out, reference.layer_norm(x, weight[0], own, 1e-5)), size


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4),
    heads=st.integers(1, 5),
    half=st.integers(0, 40),
    rest=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_rotation(native_path: str, rows: int, heads: int, half: int, rest: int, seed: int) -> None:
    g = generator(seed)
    x = torch.randn(rows, heads, 2 * half + rest + 1, generator=g)
    angle = torch.rand(rows, half, generator=g) * 100
    cos, sin = angle.cos(), angle.sin()
    assert torch.equal(rotate(native_path, x, cos, sin), reference.rotate(x, cos, sin))


# What a cache keeps.

KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4", "int3")


def remember(
    path: str, cache: ContiguousCache, request: int, layer: int, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    factor, basis = cache.format.key_factor, cache.format.basis
    heads = HeadsStruct(
        cache.format.kv_heads,
        cache.format.kv_heads,
        cache.format.head_dim,
        0,
        CACHES[cache.format.kind],
        None if factor is None else factor.data_ptr(),
        0,
        *((None, None) if basis is None else (basis.keys.data_ptr(), basis.values.data_ptr())),
    )
    store = StoreStruct(*cache.store(request).pointers)
    pointers = slots.data_ptr(), keys.data_ptr(), values.data_ptr()
    require().specpress_remember(PATHS[path], byref(heads), layer, byref(store), len(slots), *pointers)


def contents(cache: ContiguousCache, request: int) -> tuple[Any, ...]:
    store = cache.store(request)
    return store.keys, store.values, store.key_scale, store.value_scale


@pytest.mark.parametrize("factor", [False, True], ids=["plain", "key factors"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_written_as_the_reference_writes_it(native_path: str, kind: CacheKind, factor: bool) -> None:
    for kv_heads, dim in ((2, 16), (1, 80), (3, 20), (2, 33), (1, 1)):
        g = generator(dim)
        by = torch.rand(3, kv_heads, dim, generator=g) * 4 + 0.1 if factor else None
        ours, theirs = (ContiguousCache(CacheFormat(3, kv_heads, dim, torch.device("cpu"), kind, by)) for _ in range(2))
        handle = ours.open(150)
        assert theirs.open(150) == handle
        for layer in (0, 2):
            # Out of order, over block borders, and some of them twice in two goes: the later ones stay.
            for count in (40, 90, 1):
                slots = torch.randperm(192, generator=g)[:count]
                keys, values = torch.randn(2, count, kv_heads, dim, generator=g)
                keys[0] = 0.0
                values[-1] *= 1e20
                keys[count // 2] = 1e-42
                remember(native_path, ours, handle, layer, slots, keys, values)
                theirs.format.write(theirs.store(handle), layer, slots, keys, values)
        for a, b in zip(contents(ours, handle), contents(theirs, handle), strict=True):
            assert torch.equal(a, b), (kv_heads, dim)


@pytest.mark.parametrize("kind", ["int4", "int3"])
def test_a_cache_in_a_basis_is_written_as_the_reference_writes_it(native_path: str, kind: CacheKind) -> None:
    for kv_heads, dim in ((2, 16), (1, 80), (3, 33), (1, 1)):
        g = generator(dim)
        basis = CacheBasis(*(torch.randn(2, 3, kv_heads, 3, dim, dim, generator=g) * dim**-0.5))
        ours, theirs = (
            ContiguousCache(CacheFormat(3, kv_heads, dim, torch.device("cpu"), kind, basis=basis)) for _ in range(2)
        )
        handle = ours.open(150)
        assert theirs.open(150) == handle
        for layer in (0, 2):
            slots = torch.randperm(192, generator=g)[:90]
            keys, values = torch.randn(2, 90, kv_heads, dim, generator=g)
            keys[0], keys[1, 0, 0], values[-1], values[3] = 0.0, torch.nan, values[-1] * 1e20, 1e-42
            remember(native_path, ours, handle, layer, slots, keys, values)
            theirs.format.write(theirs.store(handle), layer, slots, keys, values)
        for a, b in zip(contents(ours, handle), contents(theirs, handle), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()), (kv_heads, dim)


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_slot_leaves_the_others_alone(native_path: str, kind: CacheKind) -> None:
    cache = ContiguousCache(CacheFormat(2, 2, 24, torch.device("cpu"), kind))
    handle = cache.open(64)
    keys, values = torch.randn(2, 64, 2, 24, generator=generator(4))
    remember(native_path, cache, handle, 1, torch.arange(64), keys, values)
    before = [part.clone() for part in cache.read(1, handle, 64)]
    for slot in (0, 15, 16, 31, 32, 63):
        remember(native_path, cache, handle, 1, torch.tensor([slot]), torch.ones(1, 2, 24), torch.ones(1, 2, 24))
        others = [i for i in range(64) if i != slot]
        for old, new in zip(before, cache.read(1, handle, 64), strict=True):
            assert torch.equal(old[:, :, others], new[:, :, others]) and not torch.equal(old, new)
        remember(native_path, cache, handle, 1, torch.tensor([slot]), keys[[slot]], values[[slot]])
    for part in cache.read(0, handle, 64):
        assert not part.any()
