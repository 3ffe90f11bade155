"""Whole forwards on native kernels: the reference's logits, and bits that nothing but a row and its keys decide."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.contract import CacheBasis, Rows
from runtime.errors import UserError
from runtime.kv_store import CacheKind
from runtime.model.native import NativeDecoder
from tests.runtime.model import families

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
Whole = Callable[..., Tensor]

FAMILY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")
PACKED = ("int8", "int4", "nf4", "ternary", "ternary-1.25", "int8 static", "int4 zero points", "int4 order", "mixed")
KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4", "int3")


def decoder(path: Path, kernels: str) -> NativeDecoder:
    made = load(path, kernels=kernels).decoder
    assert isinstance(made, NativeDecoder)
    return made


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="session")
def meant(whole: Whole) -> Callable[..., Tensor]:
    """meant(path, tokens, kind) are the reference's logits, computed once for all instruction paths."""
    known: dict[tuple[Path, int, str], Tensor] = {}

    def get(path: Path, tokens: Tensor, kind: CacheKind = "float32") -> Tensor:
        key = path, len(tokens), kind
        if key not in known:
            known[key] = whole(load(path, kernels="reference").decoder, tokens, kind)
        return known[key]

    return get


def chain(made: NativeDecoder, cache: ContiguousCache, request: int, tokens: Tensor) -> Tensor:
    start = cache.length(request)
    return made.forward(tokens, Rows.chains([(request, start, len(tokens))]), cache).logits


def stored(cache: ContiguousCache, request: int) -> list[Tensor]:
    """Keys and values of all layers as they are read back, without what lies behind the last token."""
    length = cache.length(request)
    parts = [part for layer in range(cache.format.layers) for part in cache.read(layer, request, length)]
    return [part.transpose(1, 2).flatten(0, 1)[:length] for part in parts]


# Against the reference.


@pytest.mark.parametrize("kind", FAMILY)
def test_logits_of_float_models_are_the_references(
    tiny: Tiny, text: Text, whole: Whole, meant: Whole, native_path: str, kind: str
) -> None:
    tokens = text(90)
    made = decoder(tiny(kind), native_path)
    assert (made.kernels, made.exact) == (native_path, True)
    assert torch.equal(whole(made, tokens), meant(tiny(kind), tokens))


def test_half_precision_caches_are_left_to_gpus(tiny: Tiny, text: Text, whole: Whole, native_path: str) -> None:
    """The reference has them too, so that there is something to compare a GPU's with."""
    with pytest.raises(UserError, match="hold keys and values in float32, int8, int4, int3, not in float16"):
        decoder(tiny("llama"), native_path).new_cache("float16")
    plain = load(tiny("llama"), kernels="reference").decoder
    tokens = text(70)
    assert 1e-6 < relative(whole(plain, tokens, "float16"), whole(plain, tokens)) < 1e-3


@pytest.mark.parametrize("scheme", PACKED)
def test_logits_of_packed_models_are_the_references(
    tiny_packed: Callable[[str], Path], text: Text, whole: Whole, meant: Whole, native_path: str, scheme: str
) -> None:
    tokens, path = text(90), tiny_packed(scheme)
    assert torch.equal(whole(decoder(path, native_path), tokens), meant(path, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_gives_the_references_logits(
    tiny: Tiny, text: Text, whole: Whole, meant: Whole, native_path: str, kind: CacheKind
) -> None:
    tokens = text(90)
    for model in ("llama", "mistral"):
        ours = whole(decoder(tiny(model), native_path), tokens, kind)
        assert torch.equal(ours, meant(tiny(model), tokens, kind))
        assert (
            relative(ours, meant(tiny(model), tokens)) < {"float32": 1e-5, "int8": 5e-2, "int4": 0.7, "int3": 1.0}[kind]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_checkpoints_of_other_dtypes(
    tiny: Tiny, text: Text, whole: Whole, tmp_path: Path, native_path: str, kind: str, dtype: torch.dtype
) -> None:
    """A tied embedding is read from the head's blocks, another from its own table."""
    shutil.copytree(tiny(kind), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({name: t.to(dtype) for name, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    tokens = text(30)
    theirs = load(tmp_path / "m", kernels="reference").decoder
    assert torch.equal(whole(decoder(tmp_path / "m", native_path), tokens), whole(theirs, tokens))


# Widths, neighbours, threads.


def same_at_every_width(made: NativeDecoder, tokens: Tensor, want: Tensor, kind: CacheKind = "float32") -> None:
    for width in range(1, 17):
        cache = made.new_cache(kind)
        request = cache.open(len(tokens))
        got = torch.cat([chain(made, cache, request, piece) for piece in tokens.split(width)])
        assert torch.equal(got, want), f"width {width}"


@pytest.mark.parametrize("kind", FAMILY)
def test_bits_of_float_models_at_every_width(tiny: Tiny, text: Text, whole: Whole, native_path: str, kind: str) -> None:
    made, tokens = decoder(tiny(kind), native_path), text(70)
    same_at_every_width(made, tokens, whole(made, tokens))


@pytest.mark.parametrize("scheme", PACKED)
def test_bits_of_packed_models_at_every_width(
    tiny_packed: Callable[[str], Path], text: Text, whole: Whole, native_path: str, scheme: str
) -> None:
    made, tokens = decoder(tiny_packed(scheme), native_path), text(70)
    same_at_every_width(made, tokens, whole(made, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_with_every_cache_at_every_width(
    tiny: Tiny, text: Text, whole: Whole, native_path: str, kind: CacheKind
) -> None:
    made, tokens = decoder(tiny("llama"), native_path), text(70)
    same_at_every_width(made, tokens, whole(made, tokens, kind), kind)


def test_bits_over_the_border_of_a_split(tiny: Tiny, text: Text, whole: Whole, native_path: str) -> None:
    """Position 512, where sums over keys begin anew, falls at every place of a forward once."""
    made, tokens = decoder(tiny("llama"), native_path), text(530)
    want = whole(made, tokens)
    cache = made.new_cache()
    request = cache.open(530)
    chain(made, cache, request, tokens[:498])
    for width in range(1, 17):
        got = torch.cat([chain(made, cache, request, piece) for piece in tokens[498:].split(width)])
        assert torch.equal(got, want[498:]), f"width {width}"
        cache.truncate(request, 498)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("kind", ["llama", "mixtral", *PACKED])
def test_bits_on_one_two_and_three_threads(
    tiny: Tiny, tiny_packed: Callable[[str], Path], text: Text, whole: Whole, native_path: str, kind: str
) -> None:
    path = tiny_packed(kind) if kind in PACKED else tiny(kind)
    tokens, results = text(150), []
    for threads in (1, 2, 3):
        made = load(path, kernels=native_path, threads=threads).decoder
        assert made.threads == threads
        results.append(torch.cat((whole(made, tokens), whole(made, tokens[:1]))))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_caches_are_written_the_same_on_any_threads(tiny: Tiny, text: Text, native_path: str, kind: CacheKind) -> None:
    """Two slots may share a byte. Were it written by two threads, some of these forwards could differ."""
    tokens, results = text(250), []
    for threads in (1, 3):
        made = load(tiny("llama"), kernels=native_path, threads=threads).decoder
        assert isinstance(made, NativeDecoder)
        for _ in range(1 if threads == 1 else 15):
            cache = made.new_cache(kind)
            request = cache.open(250)
            results.append([chain(made, cache, request, tokens), *stored(cache, request)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_neighbours(
    tiny: Tiny, text: Text, whole: Whole, native_path: str, kind: CacheKind
) -> None:
    made = decoder(tiny("mistral"), native_path)
    texts = [text(n, seed=n) for n in (5, 70, 33)]
    want = [whole(made, t, kind) for t in texts]
    cache = made.new_cache(kind)
    handles = [cache.open(80) for _ in texts]
    generator = torch.Generator().manual_seed(3)
    while any(cache.length(h) < len(t) for h, t in zip(handles, texts, strict=True)):
        spans, tokens, expected = [], [], []
        for handle, full, logits in zip(handles, texts, want, strict=True):
            start = cache.length(handle)
            count = min(int(torch.randint(0, 12, (), generator=generator)), len(full) - start)
            if count:
                spans.append((handle, start, count))
                tokens.append(full[start : start + count])
                expected.append(logits[start : start + count])
        if spans:
            assert torch.equal(made.forward(torch.cat(tokens), Rows.chains(spans), cache).logits, torch.cat(expected))


# Trees and rollback.

PARENTS = [-1, 0, 0, 1, 2, 2, 4, -1, 7, 6]


def tree_rows(request: int, base: int, offset: int = 0) -> Rows:
    depth: list[int] = []
    for parent in PARENTS:
        depth.append(base if parent == -1 else depth[parent] + 1)
    parents = [p if p == -1 else p + offset for p in PARENTS]
    return Rows(torch.full((len(PARENTS),), request), torch.tensor(depth), torch.tensor(parents))


def path_to(leaf: int) -> list[int]:
    path = [leaf]
    while PARENTS[path[0]] != -1:
        path.insert(0, PARENTS[path[0]])
    return path


@pytest.mark.parametrize("base", [0, 62, 70, 509])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_each_path_of_a_tree_equals_its_chain(
    tiny: Tiny, text: Text, native_path: str, model: str, kind: CacheKind, base: int
) -> None:
    made = decoder(tiny(model), native_path)
    cache = made.new_cache(kind)
    request, twin = cache.open(base + 20), cache.open(base + 20)
    if base:
        chain(made, cache, request, text(base))
        chain(made, cache, twin, text(base))
    tokens = text(len(PARENTS), seed=9)
    tree = made.forward(tokens, tree_rows(request, base), cache).logits
    for leaf in range(len(PARENTS)):
        want = chain(made, cache, twin, tokens[path_to(leaf)])
        assert torch.equal(tree[leaf], want[-1]), f"row {leaf}"
        cache.truncate(twin, base)
    # Keeping one branch, or none, leaves exactly the cache of that chain.
    for leaf in (9, 5, None):
        path = [] if leaf is None else path_to(leaf)
        cache.keep(request, base, path)
        if path:
            chain(made, cache, twin, tokens[path])
        if base + len(path):
            assert all(torch.equal(a, b) for a, b in zip(stored(cache, request), stored(cache, twin), strict=True))
        more = text(4, seed=11)
        assert torch.equal(chain(made, cache, request, more), chain(made, cache, twin, more))
        cache.truncate(request, base)
        cache.truncate(twin, base)
        assert torch.equal(made.forward(tokens, tree_rows(request, base), cache).logits, tree)


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_restores_the_state_exactly(
    tiny: Tiny, text: Text, whole: Whole, native_path: str, kind: CacheKind
) -> None:
    made, tokens = decoder(tiny("llama"), native_path), text(90)
    want = whole(made, tokens, kind)
    cache = made.new_cache(kind)
    request = cache.open(100)
    chain(made, cache, request, tokens[:40])
    for seed in range(5):
        chain(made, cache, request, text(13, seed=50 + seed))
        cache.truncate(request, 40)
    assert torch.equal(chain(made, cache, request, tokens[40:]), want[40:])
    # The positive: one wrong key shows.
    cache.truncate(request, 40)
    cache.write(0, request, 17, torch.randn(1, 2, 16), torch.randn(1, 2, 16))
    assert not torch.equal(chain(made, cache, request, tokens[40:]), want[40:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_beside_a_chain_in_one_batch(tiny: Tiny, text: Text, native_path: str, kind: CacheKind) -> None:
    made = decoder(tiny("qwen3"), native_path)
    cache = made.new_cache(kind)
    handles = [cache.open(100) for _ in range(2)]
    before, tokens, line = [text(70), text(33, seed=1)], text(len(PARENTS), seed=2), text(6, seed=3)
    for handle, prompt in zip(handles, before, strict=True):
        chain(made, cache, handle, prompt)
    alone = [made.forward(tokens, tree_rows(handles[0], 70), cache).logits, chain(made, cache, handles[1], line)]
    for first in (0, 1):
        cache.truncate(handles[0], 70)
        cache.truncate(handles[1], 33)
        chained, count = Rows.chains([(handles[1], 33, 6)]), len(PARENTS)
        if first == 0:
            tree, parts, ids = tree_rows(handles[0], 70), [alone[0], alone[1]], [tokens, line]
            chained = Rows(
                chained.request, chained.position, torch.where(chained.parent < 0, -1, chained.parent + count)
            )
            rows = [tree, chained]
        else:
            rows, parts, ids = [chained, tree_rows(handles[0], 70, 6)], [alone[1], alone[0]], [line, tokens]
        both = Rows(*(torch.cat([getattr(r, name) for r in rows]) for name in ("request", "position", "parent")))
        assert torch.equal(made.forward(torch.cat(ids), both, cache).logits, torch.cat(parts))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "int4"),
        ("llama", "int3"),
        ("deepseek_v2", "int3"),
        ("gemma4_text", "int4"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("deepseek_v2", "int4"), ("gemma4_text", "int3"))),
    ],
)
def test_caches_in_a_basis_have_the_references_bits(
    tiny: Tiny, text: Text, tmp_path: Path, native_path: str, kind: CacheKind, family: str
) -> None:
    """At every width, in latent attention and with keys of two shapes; and without the basis they are others."""
    path = tiny("llama") if family == "llama" else families.write(family, tmp_path / family)
    made, tokens = decoder(path, native_path), text(80) % families.VOCABULARY
    a, g = made.architecture, torch.Generator().manual_seed(1)
    values = a.value_dim if a.latent is not None else 0
    forms = [
        tuple(
            CacheFormat(layers, heads, dim, made.device, kind, None, values, basis=basis)
            for (layers, heads, dim), basis in zip(a.cache_shape.groups, found, strict=True)
        )
        for found in (
            [random_basis(layers, heads, dim, values or dim, g) for layers, heads, dim in a.cache_shape.groups],
            [None] * len(a.cache_shape.groups),
        )
    ]
    reference = load(path, kernels="reference").decoder
    results = []
    for form in forms:
        caches = [ContiguousCache(form) for _ in range(3)]
        rows = [Rows.chains([(cache.open(80), 0, 80)]) for cache in caches]
        ours, theirs = (
            d.forward(tokens, r, c).logits for d, r, c in zip((made, reference), rows, caches[:2], strict=False)
        )
        assert torch.equal(ours, theirs)
        pieces = [chain(made, caches[2], 0, piece) for piece in tokens.split([50, 1, 7, 1, 21])]
        assert torch.equal(torch.cat(pieces), ours)
        results.append(ours)
    assert not torch.equal(*results)


def random_basis(layers: int, heads: int, dim: int, values: int, g: torch.Generator) -> CacheBasis:
    return CacheBasis(*(torch.randn(layers, heads, 3, size, size, generator=g) * size**-0.5 for size in (dim, values)))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_caches_with_and_without_key_factors_by_turns(
    tiny: Tiny, text: Text, native_path: str, kind: CacheKind
) -> None:
    made, tokens = decoder(tiny("llama"), native_path), text(80)
    a = made.architecture
    factor = torch.rand(a.layers, a.kv_heads, a.head_dim, generator=torch.Generator().manual_seed(1)) + 0.5
    reference = load(tiny("llama"), kernels="reference").decoder
    results = []
    for by in (None, factor, None, factor):
        caches = [
            ContiguousCache(CacheFormat(a.layers, a.kv_heads, a.head_dim, made.device, kind, by)) for _ in range(2)
        ]
        rows = [Rows.chains([(cache.open(80), 0, 80)]) for cache in caches]
        ours, theirs = (d.forward(tokens, r, c).logits for d, r, c in zip((made, reference), rows, caches, strict=True))
        assert torch.equal(ours, theirs)
        results.append(ours)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


# What is asked for, and what is refused.


def test_logits_only_where_asked_for(tiny: Tiny, text: Text, whole: Whole, native_path: str) -> None:
    made, tokens = decoder(tiny("llama"), native_path), text(20)
    want = whole(made, tokens)
    for at in ([3, 19], [19, 3, 3], [0], []):
        cache = made.new_cache()
        rows = Rows.chains([(cache.open(20), 0, 20)])
        out = made.forward(tokens, rows, cache, logits_at=torch.tensor(at, dtype=torch.long))
        assert torch.equal(out.logits, want[at]) and out.hidden.shape == (len(at), 64) and cache.length(0) == 20
    cache = made.new_cache()
    out = made.forward(tokens[:0], Rows.chains([]), cache)
    assert out.logits.shape == (0, 320) and out.hidden.shape == (0, 64)


def test_heads_beyond_the_kernels_are_refused(tiny: Tiny, native_path: str) -> None:
    decoder(tiny("llama", head_dim=1024), native_path)
    with pytest.raises(UserError, match="head_dim is 1040, and the native kernels hold at most 1024"):
        load(tiny("llama", head_dim=1040), kernels=native_path)


def test_what_contradicts_the_model_or_the_cache_is_refused(tiny: Tiny, text: Text, native_path: str) -> None:
    made = decoder(tiny("llama"), native_path)
    cache = made.new_cache()
    request = cache.open(64)
    three = Rows.chains([(request, 0, 3)])
    for tokens, rows, at, message in (
        (text(2), three, None, "2 tokens for 3 rows"),
        (torch.tensor([1, 320, 1]), three, None, "token ids must lie in 0..319"),
        (torch.tensor([1, -1, 1]), three, None, "token ids must lie in 0..319"),
        (text(3).float(), three, None, "tokens must be integers"),
        (text(3).view(3, 1), three, None, "tokens must be integers"),
        (text(3), three, torch.tensor([3]), "logits_at must lie in 0..2"),
        (text(3), three, torch.tensor([-1]), "logits_at must lie in 0..2"),
        (text(3), three, torch.tensor([0.5]), "logits_at must be integers"),
        (text(3), Rows.chains([(request, 5, 3)]), None, "position"),
        (text(65), Rows.chains([(request, 0, 65)]), None, "do not fit a cache of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            made.forward(tokens, rows, cache, at)
        assert cache.length(request) == 0
    with pytest.raises(TypeError, match="needs the cache of its new_cache"):
        made.forward(text(3), three, object())  # type: ignore[arg-type]
    for other in (
        ContiguousCache(CacheFormat(1, 2, 16, made.device)),
        ContiguousCache(CacheFormat(2, 2, 8, made.device)),
    ):
        with pytest.raises(ValueError, match="this cache is another model's"):
            made.forward(text(3), Rows.chains([(other.open(64), 0, 3)]), other)
    made.forward(text(3), three, cache)
    assert cache.length(request) == 3
