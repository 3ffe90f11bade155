"""The contiguous cache: what is read is what was written, rolling back is exact, and handles are looked after."""

import pytest
import torch
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.errors import UserError
from runtime.kv_store import CacheKind

KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4", "int3")
LAYERS, HEADS, DIM = 2, 3, 20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: CacheKind = "float32", key_factor: Tensor | None = None) -> ContiguousCache:
    return ContiguousCache(CacheFormat(LAYERS, HEADS, DIM, torch.device("cpu"), kind, key_factor))


def tokens(count: int, seed: int) -> Tensor:
    """Keys and values of all layers: (2, LAYERS, count, HEADS, DIM)."""
    return torch.randn(2, LAYERS, count, HEADS, DIM, generator=generator(seed))


def append(cache: ContiguousCache, request: int, both: Tensor) -> None:
    start = cache.reserve(request, both.shape[2])
    for layer in range(LAYERS):
        cache.write(layer, request, start, both[0, layer], both[1, layer])


def stored(cache: ContiguousCache, request: int) -> Tensor:
    """What the cache holds, as `tokens` gives it."""
    length = cache.length(request)
    parts = [[x.transpose(1, 2).flatten(0, 1)[:length] for x in cache.read(i, request, length)] for i in range(LAYERS)]
    return torch.stack([torch.stack([pair[i] for pair in parts]) for i in range(2)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_was_written(kind: CacheKind) -> None:
    cache, both = make(kind), tokens(150, 1)
    handle = cache.open(150)
    for piece in both.split([1, 62, 1, 70, 16], dim=2):
        append(cache, handle, piece)
    got = stored(cache, handle)
    if kind == "float32":
        assert torch.equal(got, both)
        return
    if kind == "float16":
        assert torch.equal(got, both.half().float())
        return
    # Half a step of each token and head, and not much less: it is rounded.
    step = both.abs().amax(-1, keepdim=True) / {"int8": 127, "int4": 7, "int3": 4.25}[kind]
    error = (got - both).abs() / step
    # Three bits end at 3 on the side that is not the extreme's.
    most = 1.25 if kind == "int3" else 0.5
    assert float(error.max()) <= most + 1e-4 and float(error.mean()) > 0.15


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_key_factors_even_out_channels(kind: CacheKind) -> None:
    both = tokens(100, 2)
    spread = torch.logspace(-2, 2, DIM).expand(LAYERS, HEADS, DIM).contiguous()
    both[0] = both[0] * spread[:, None]
    plain, factored = make(kind), make(kind, spread)
    for cache in (plain, factored):
        append(cache, cache.open(100), both)
    errors = [((stored(c, 0)[0] - both[0]) / spread[:, None]).square().mean() for c in (plain, factored)]
    assert errors[1] < errors[0] / 10
    assert torch.equal(stored(plain, 0)[1], stored(factored, 0)[1])


def test_key_factors_that_do_not_fit_are_refused() -> None:
    good = torch.ones(LAYERS, HEADS, DIM)
    assert make("int8", good).format.key_factor is good
    for wrong in (good[0], good[..., :1], good * 0, -good, good * torch.nan, good * torch.inf):
        with pytest.raises(ValueError, match="key_factor must be"):
            make("int8", wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_and_writing_again_leave_no_trace(kind: CacheKind) -> None:
    cache, other = make(kind), make(kind)
    handle, twin = cache.open(130), other.open(130)
    first, second = tokens(61, 3), tokens(40, 4)
    append(cache, handle, first)
    for seed in range(3):
        append(cache, handle, tokens(69, 50 + seed) * 100)
        cache.truncate(handle, 61)
    append(cache, handle, second)
    append(other, twin, first)
    append(other, twin, second)
    assert torch.equal(stored(cache, handle), stored(other, twin)) and cache.length(handle) == 101


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [[], [0], [9], [1, 4, 5, 9], [9, 0, 3, 1], [3, 2, 1, 0]])
def test_keeping_a_path_moves_its_slots_together(kind: CacheKind, path: list[int]) -> None:
    """Over the border of a block of 64, in any order: nothing that is read was already overwritten."""
    cache, other = make(kind), make(kind)
    handle, twin = cache.open(90), other.open(90)
    before, tree = tokens(60, 5), tokens(10, 6)
    append(cache, handle, before)
    append(cache, handle, tree)
    cache.keep(handle, 60, path)
    append(other, twin, before)
    append(other, twin, tree[:, :, path])
    assert cache.length(handle) == 60 + len(path)
    assert torch.equal(stored(cache, handle), stored(other, twin))


@pytest.mark.parametrize("kind", KINDS)
def test_gathering_reads_slots_in_any_order(kind: CacheKind) -> None:
    cache = make(kind)
    handle = cache.open(200)
    append(cache, handle, tokens(200, 7))
    slots = torch.randperm(200, generator=generator(8))[:70]
    everything = stored(cache, handle)
    for layer in range(LAYERS):
        for part, whole in zip(cache.gather(layer, handle, slots), everything[:, layer], strict=True):
            assert part.shape == (2, HEADS, 64, DIM)
            assert torch.equal(part.transpose(1, 2).flatten(0, 1)[:70], whole[slots])
            assert not part[1, :, 6:].any()


def test_requests_do_not_see_each_other_and_handles_are_given_out_again() -> None:
    cache = make()
    first, second = cache.open(10), cache.open(100)
    assert first != second and (cache.capacity(first), cache.capacity(second)) == (64, 128)
    append(cache, first, tokens(10, 9))
    append(cache, second, tokens(20, 10))
    assert torch.equal(stored(cache, first), tokens(10, 9)) and torch.equal(stored(cache, second), tokens(20, 10))
    cache.close(first)
    assert torch.equal(stored(cache, second), tokens(20, 10))
    again = cache.open(10)
    assert again == first and cache.length(again) == 0
    assert not cache.store(again).keys.any()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    cache = make()
    handle = cache.open(64)
    append(cache, handle, tokens(60, 11))
    with pytest.raises(ValueError, match="60 \\+ 5 tokens do not fit a cache of 64"):
        cache.reserve(handle, 5)
    for length in (-1, 61):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(handle, length)
    for path in ([10], [-1]):
        with pytest.raises(ValueError, match="not all among the 60"):
            cache.keep(handle, 50, path)
    assert cache.length(handle) == 60 and torch.equal(stored(cache, handle), tokens(60, 11))
    assert cache.reserve(handle, 4) == 60
    with pytest.raises(UserError, match="at least 1 token"):
        cache.open(0)
    with pytest.raises(UserError, match="GB, which this machine refused"):
        cache.open(10**13)


def test_bytes_per_token() -> None:
    per_head = {"float32": 80, "float16": 40, "int8": 24, "int4": 14, "int3": 12}
    for kind in KINDS:
        cache = make(kind)
        assert cache.bytes_per_token() == 2 * LAYERS * HEADS * per_head[kind]
        store = cache.store(cache.open(64))
        held = sum(part.nbytes for part in (store.keys, store.values, store.key_scale, store.value_scale))
        # Values are held in whole vectors of 16: 32 for 20 dimensions.
        assert cache.bytes_per_token() <= held / 64 <= 1.6 * cache.bytes_per_token()
