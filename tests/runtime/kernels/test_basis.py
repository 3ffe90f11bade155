"""Caches in a basis of their heads: what is stored, what is refused, and rolling back."""

import pytest
import torch
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import PACKINGS, CacheFormat
from runtime.contract import CacheBasis, CacheKind
from runtime.kernels.basis import BACK, FEEDBACK, INTO, level, round_in_basis, round_signed, rounded_back, turned
from runtime.kv_store import HALVES, IN_BASIS, halves_of, scale_of, with_halves

# As rows of as many bits are rounded without a basis, and with signed scales.
PLAIN = {"int4": (-8.0, 8), "int3": (-4.25, 4)}
KINDS: tuple[CacheKind, ...] = ("int4", "int3")
LAYERS, HEADS, DIM = 2, 3, 36


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def basis(dim: int = DIM, values: int = DIM, seed: int = 0) -> CacheBasis:
    return CacheBasis(*(normal(LAYERS, HEADS, 3, d, d, seed=seed + d) * d**-0.5 for d in (dim, values)))


def form(kind: CacheKind, own: CacheBasis | None) -> CacheFormat:
    return CacheFormat(LAYERS, HEADS, DIM, torch.device("cpu"), kind, basis=own)


def test_a_turn_is_the_product() -> None:
    """Heads that share keys share a matrix."""
    x, matrices = normal(7, 6, 33), normal(2, 33, 33, seed=1)
    want = torch.einsum("nhd,hde->nhe", x.double(), matrices.double().repeat_interleave(3, 0))
    torch.testing.assert_close(turned(x, matrices).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_make_up_for_each_other(kind: CacheKind) -> None:
    """What a row loses is what each code loses of what it was to be, by the columns of a triangular matrix: the codes
    alone, without feedback, lose more."""
    g = torch.linalg.qr(normal(DIM, DIM).double())[0]
    steps = torch.where(torch.arange(DIM) < HALVES, 2.0, 1.0).double()
    unit = ((normal(DIM, DIM, seed=1).double() * 0.3).triu(1) + torch.eye(DIM)) * steps
    # x = g · unit · z, of which z is rounded.
    into, back = torch.linalg.solve_triangular(unit, g.T, upper=True), g @ unit
    one = torch.stack((into.T, (unit / steps[:, None]).T.tril(-1), back.T)).float()
    x = (normal(400, 1, DIM, seed=2).double() @ back.T).float()
    lost = []
    for feedback in (True, False):
        own = one.clone()
        own[FEEDBACK] *= feedback
        codes, scale = round_in_basis(x, IN_BASIS[kind], own[None])
        half = IN_BASIS[kind].half
        assert int(codes.min()) == -half and int(codes.max()) == half - 1
        lost.append(
            float((turned(rounded_back(codes, scale, IN_BASIS[kind].knee), own[None, BACK]) - x).norm() / x.norm())
        )
    assert lost[0] < 0.9 * lost[1] and lost[0] < {"int4": 0.12, "int3": 0.25}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7, HALVES, 64])
def test_halves_lie_in_the_scales(kind: CacheKind, dim: int) -> None:
    """What is put in comes out, and codes are nearer by them: most of all where every dimension has some."""
    scales, halves = normal(5, 3) * 7, normal(5, 3, min(dim, HALVES), seed=1) > 0
    words = with_halves(scale_of(scales), halves)
    assert (
        torch.equal(halves_of(words, dim)[..., :HALVES], halves / 2) and not halves_of(words, dim)[..., HALVES:].any()
    )
    assert torch.equal(scale_of(words), scale_of(scales)) and not torch.equal(words, scale_of(scales))
    torch.testing.assert_close(scale_of(scales), scales, rtol=1 / 8, atol=0)
    same = torch.stack((torch.eye(dim), torch.zeros(dim, dim), torch.eye(dim)))[None]
    x = normal(300, 1, dim, seed=2)
    held = rounded_back(*round_in_basis(x, IN_BASIS[kind], same), IN_BASIS[kind].knee)
    codes, scale = round_signed(x, PLAIN[kind])
    plain = codes * scale[..., None]
    if dim > 1:  # a row of one number is a code and its scale
        assert float((held - x)[..., :HALVES].norm()) < 0.7 * float((plain - x)[..., :HALVES].norm())
        assert float((held - x)[..., HALVES:].norm()) <= 1.1 * float((plain - x)[..., HALVES:].norm())


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_takes_the_nearest_level(kind: CacheKind) -> None:
    """Of those that its dimension has, and steps double beyond the knee."""
    levels, dim = IN_BASIS[kind], HALVES + 5
    same = torch.stack((torch.eye(dim), torch.zeros(dim, dim), torch.eye(dim)))[None]
    x = normal(2000, 1, dim)
    codes, scale = round_in_basis(x, levels, same)
    found = rounded_back(codes, scale, levels.knee) / scale_of(scale)[..., None]
    wanted = x / scale_of(scale)[..., None]
    for part, step in ((slice(HALVES), 0.5), (slice(HALVES, None), 1.0)):
        every = level(torch.arange(-levels.half, levels.half, step), levels.knee)
        steps = every.diff()
        assert float(steps.min()) == step and float(steps.max()) == 2 * step and float(steps[0]) == 2 * step
        least = (wanted[..., part, None] - every).abs().amin(-1)
        torch.testing.assert_close((wanted - found)[..., part].abs(), least, rtol=1e-5, atol=1e-5)
        assert set(found[..., part].unique().tolist()) == set(every.tolist())
        assert torch.equal(every.half().float(), every)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_have_the_extremes_sign(kind: CacheKind) -> None:
    x = torch.tensor([[[3.0, -1.0, 0.5], [-3.0, 1.0, 0.0]]])
    codes, scale = round_signed(x, PLAIN[kind])
    assert scale.sign().tolist() == [[-1.0, 1.0]] and codes[0, :, 0].tolist() == [-PLAIN[kind][1]] * 2
    _, words = round_in_basis(x, IN_BASIS[kind], torch.stack((torch.eye(3), torch.zeros(3, 3), torch.eye(3)))[None])
    assert torch.equal(words.sign(), scale.sign())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_numbers(kind: CacheKind) -> None:
    x = torch.tensor([[[0.0, 0.0], [1e-42, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [3e38, 1.0]]])
    same = torch.stack((torch.eye(2), torch.zeros(2, 2), torch.eye(2))).expand(5, 3, 2, 2)
    for codes, scale in (round_signed(x, PLAIN[kind]), round_in_basis(x, IN_BASIS[kind], same)):
        assert not codes[0, :4].any() and codes[0, 4, 0] < 0
        assert (
            float(scale_of(scale)[0, 0]) == 0
            and bool(scale[0, 2].isnan())
            and not bool(scale_of(scale)[0, 3].isfinite())
        )


def test_three_bits_are_packed_and_unpacked() -> None:
    unpacked, packed = PACKINGS["int3"]
    codes = torch.randint(-4, 4, (3, 5, 48), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    stored = packed(codes)
    assert stored.shape == (3, 5, 18) and torch.equal(unpacked(stored), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [None, 8])
def test_truncation_leaves_no_trace(kind: CacheKind, pages: int | None) -> None:
    caches = [
        ContiguousCache(form(kind, basis())) if pages is None else PagedCache(form(kind, basis()), pages) for _ in "ab"
    ]
    kept, rejected = normal(2, LAYERS, 90, HEADS, DIM), normal(2, LAYERS, 30, HEADS, DIM, seed=1) * 50
    handles = [cache.open(130) for cache in caches]
    for number, (cache, handle) in enumerate(zip(caches, handles, strict=True)):
        for start in (0, 45):
            for layer in range(LAYERS if number else 0):
                cache.write(layer, handle, _room(cache, handle, 30) if not layer else start, *rejected[:, layer])
            cache.truncate(handle, start)
            first = _room(cache, handle, 45)
            for layer in range(LAYERS):
                cache.write(layer, handle, first, *kept[:, layer, start : start + 45])
    for layer in range(LAYERS):
        for a, b in zip(*(c.read(layer, h, 90) for c, h in zip(caches, handles, strict=True)), strict=True):
            rows = [part.transpose(1, 2).flatten(0, 1)[:90] for part in (a, b)]
            assert torch.equal(*rows) and rows[0].any()
    assert caches[0].bytes_per_token() == LAYERS * HEADS * 2 * ({"int4": 18, "int3": 14}[kind] + 4)


def _room(cache: ContiguousCache | PagedCache, handle: int, count: int) -> int:
    start = cache.length(handle)
    cache.reserve(handle, count)
    return start


def test_bases_that_do_not_fit_are_refused() -> None:
    assert form("int4", basis()).basis is not None
    for kind, own, factor in (
        ("int4", basis(16), None),
        ("int3", basis(DIM, 16), None),
        ("int8", basis(), None),
        ("int4", basis(), torch.ones(LAYERS, HEADS, DIM)),
    ):
        with pytest.raises(ValueError, match="a basis is"):
            CacheFormat(LAYERS, HEADS, DIM, torch.device("cpu"), kind, factor, basis=own)  # type: ignore[arg-type]
    assert INTO == 0
