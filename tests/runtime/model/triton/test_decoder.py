"""The decoder on Triton's kernels: the reference's logits, and the same bits whatever shares the call."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.contract import Cache, CacheBasis, CacheScheme, Decoder, Rows, integers
from runtime.kv_store import CacheKind
from runtime.model.triton.cache import GpuCache
from runtime.model.triton.decoder import TritonDecoder
from tests.slices import often

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
Text = Callable[..., Tensor]
MODELS = ("llama", "mistral", "qwen3", "gemma", "mixtral")
PACKED = ("int8", "int4", "nf4", "ternary", "mixed", "fp8")


def decoder(path: Path, device: str, **options: bool) -> TritonDecoder:
    made = load(path, device=device, kernels="triton", **options).decoder
    assert isinstance(made, TritonDecoder) and made.exact
    return made


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b).norm() / b.norm())


def feed(made: Decoder, cache: Cache, request: int, tokens: Tensor) -> Tensor:
    return made.forward(tokens, Rows.chains([(request, cache.length(request), len(tokens))]), cache).logits


def whole(made: Decoder, tokens: Tensor, kind: CacheKind = "float32") -> Tensor:
    cache = made.new_cache(kind)
    return feed(made, cache, cache.open(len(tokens)), tokens)


def in_pieces(made: TritonDecoder, tokens: Tensor, widths: Sequence[int], kind: CacheKind = "float32") -> Tensor:
    cache = made.new_cache(kind)
    request = cache.open(len(tokens))
    return torch.cat([feed(made, cache, request, piece) for piece in tokens.split(list(widths))])


@pytest.mark.parametrize("kind", often(MODELS, "mistral"))
def test_float_models(small: Tiny, text: Text, device: str, longer: int, kind: str) -> None:
    """1e-5 of the logits' norm: the order of float sums, and weights multiplied as three bfloat16 terms."""
    path = small(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
    made, tokens = decoder(path, device), text(9 * longer)
    got = whole(made, tokens)
    assert relative(got, whole(load(path, kernels="reference").decoder, tokens)) < 1e-5
    # Widths that are buckets, and one that is filled up.
    assert torch.equal(in_pieces(made, tokens, (7, 1, len(tokens) - 8)), got)


@pytest.mark.parametrize("scheme", often(PACKED, "mixed"))
def test_packed_models(tiny_packed: TinyPacked, text: Text, device: str, longer: int, scheme: str) -> None:
    made, tokens = decoder(tiny_packed(scheme), device), text(6 * longer)
    got = whole(made, tokens)
    # A code that falls to the other side of a rounding moves what follows by its step, and in long texts one does.
    first = tokens[:6]
    assert relative(got[:6], whole(load(tiny_packed(scheme), kernels="reference").decoder, first)) < 1e-3
    assert torch.equal(in_pieces(made, tokens, (1, len(tokens) - 1)), got)


@pytest.mark.parametrize("kind", often(["float16", "int8", "int4"], "int4"))
def test_rounded_caches(small: Tiny, text: Text, device: str, longer: int, kind: CacheKind) -> None:
    made, tokens = decoder(small("llama"), device), text(9 * longer)
    got = whole(made, tokens, kind)
    want = whole(load(small("llama"), kernels="reference").decoder, tokens, kind)
    assert relative(got, want) < {"float16": 1e-3, "int8": 5e-3, "int4": 5e-2}[kind]
    assert torch.equal(in_pieces(made, tokens, (1, len(tokens) - 1), kind), got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="minutes in the interpreter, where the kernels have theirs")
def test_prompts_of_many_rows(small: Tiny, text: Text, device: str) -> None:
    """Wider than what is captured: other kernels, the same bits."""
    made, tokens = decoder(small("llama", num_hidden_layers=1), device), text(66)
    assert torch.equal(in_pieces(made, tokens, (60, 6)), whole(made, tokens))


def test_trees_batches_and_what_is_asked_for(small: Tiny, text: Text, device: str) -> None:
    """Two texts and a prompt in one forward, one of the texts with a tree: each row as in a chain of its own."""
    made = decoder(small("llama", num_hidden_layers=1), device)
    texts = [text(length, seed=length) for length in (62, 3, 4)]
    cache = made.new_cache("float32", pages=12)
    handles = [cache.open(100) for _ in texts]
    for handle, tokens in zip(handles[:2], texts, strict=False):
        feed(made, cache, handle, tokens)
    twins = [cache.fork(handle) for handle in handles]
    tree, parents = text(5, seed=9), [-1, 0, 0, 2, -1]
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
    tokens = torch.cat((tree, text(1, seed=1), texts[2]))
    request = [handles[0]] * 5 + [handles[1]] + [handles[2]] * 4
    position = [62 + len(path) - 1 for path in paths] + [3, *range(4)]
    rows = Rows(integers(request), integers(position), integers([*parents, -1, -1, 6, 7, 8]))
    got = made.forward(tokens, rows, cache).logits
    for path, row in zip(paths, got, strict=False):
        assert torch.equal(row, feed(made, cache, twins[0], tree[path])[-1])
        cache.truncate(twins[0], 62)
    assert torch.equal(got[5:6], feed(made, cache, twins[1], text(1, seed=1)))
    assert torch.equal(got[6:], feed(made, cache, twins[2], texts[2]))
    # What is kept of the tree is a chain again, over the border of a page.
    cache.keep(handles[0], 62, [0, 2, 3])
    after = torch.cat((tree[[0, 2, 3]], text(1, seed=3)))
    assert torch.equal(feed(made, cache, handles[0], after[3:])[-1], feed(made, cache, twins[0], after)[-1])
    cache.truncate(handles[2], 2)
    out = made.forward(texts[2][2:], Rows.chains([(handles[2], 2, 2)]), cache, integers([1]))
    assert torch.equal(out.logits, got[-1:]) and out.hidden.shape == (1, 64)
    assert made.forward(integers([]), Rows.chains([]), cache).logits.shape == (0, 320)


def test_a_pool_that_moves_and_forwards_that_are_refused(small: Tiny, text: Text, device: str) -> None:
    made, tokens = decoder(small("llama", num_hidden_layers=1), device), text(9)
    cache = made.new_cache()
    assert isinstance(cache, GpuCache)
    first = cache.open(20)
    feed(made, cache, first, tokens[:5])
    before = cache.memory
    others = [cache.open(200) for _ in range(3)]
    assert cache.memory is not before
    assert torch.equal(feed(made, cache, first, tokens[5:]), feed(made, cache, others[2], tokens)[5:])
    with pytest.raises(TypeError, match=r"needs the cache of its new_cache"):
        made.forward(tokens, Rows.chains([(0, 0, 9)]), ContiguousCache(CacheFormat(1, 1, 16, torch.device("cpu"))))
    with pytest.raises(ValueError, match="is at position 3"):
        made.forward(tokens, Rows.chains([(first, 3, 9)]), cache)
    assert cache.length(first) == 9


def test_weights_are_held_once(tiny: Tiny, tiny_packed: TinyPacked, device: str) -> None:
    """A tied head is the embedding; upper halves have no memory of their own."""
    tied = decoder(tiny("llama"), device)
    assert tied.weight_bytes == sum(p.numel() for p in set_of(tied)) * 4
    made = decoder(tiny_packed("int8"), device, planes=True)
    assert made.upper().weight_bytes < made.weight_bytes


def set_of(made: TritonDecoder) -> list[Tensor]:
    from runtime.model.layers import _tensors

    return list({tensor.data_ptr(): tensor for tensor in _tensors(made.parts)}.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int3"])
def test_caches_in_a_basis(small: Tiny, text: Text, device: str, kind: CacheKind) -> None:
    """The reference's logits, the same bits at every width; and other ones than without the basis."""
    made, tokens = decoder(small("llama"), device), text(9)
    reference, a = load(small("llama"), kernels="reference").decoder, made.architecture
    without = whole(made, tokens, kind)
    g = torch.Generator().manual_seed(1)
    bases = [torch.randn(a.layers, a.kv_heads, 3, a.head_dim, a.head_dim, generator=g) * a.head_dim**-0.5 for _ in "kv"]
    reference.kv = CacheScheme(kind, bases=(CacheBasis(*bases),))
    made.kv = CacheScheme(kind, bases=(CacheBasis(*(part.to(made.device) for part in bases)),))
    got = whole(made, tokens, kind)
    # A code may fall to the other side of its border.
    assert relative(got, whole(reference, tokens, kind)) < 0.02
    assert torch.equal(in_pieces(made, tokens, (7, 1, len(tokens) - 8), kind), got) and not torch.equal(got, without)
