"""Every family in the table: transformers' logits, the reference's bits, and the same bits at every width."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.checkpoints.families import FAMILIES as KNOWN
from runtime.checkpoints.families import LLAMA
from runtime.contract import Decoder, Rows
from runtime.kv_store import CacheKind
from runtime.model.base import BaseDecoder
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from tests.runtime.model.families import FAMILIES, VOCABULARY, WINDOW, pack, write

Made = Callable[..., Path]
KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
FLOATS = CacheOptions("float32")
# The cache that each scheme of weights meets at all widths and the reference in: what a cache does at a width is
# the same whatever made its keys, so all pairs of both would find nothing more and take three times as long.
ALL_WIDTHS: dict[str, CacheKind] = {"float32": "int8", "int8": "int4", "int4": "float32"}
# A tree of three levels.
PARENTS, DEPTHS = [-1, 0, 0, 1, 2, 2, 4], [0, 1, 1, 2, 2, 2, 3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made("gemma2") is the family's directory; with a scheme its packed one, and with plain what that stands for."""
    known: dict[str, Path] = {}

    def get(kind: str, scheme: str = "float32", plain: bool = False) -> Path:
        if kind not in known:
            known[kind] = write(kind, tmp_path_factory.mktemp(kind) / kind)
        if scheme == "float32":
            return known[kind]
        if f"{kind}-{scheme}" not in known:
            folders = pack(known[kind], tmp_path_factory.mktemp(kind) / scheme, scheme)
            known[f"{kind}-{scheme}"], known[f"{kind}-{scheme}-plain"] = folders
        return known[f"{kind}-{scheme}{'-plain' if plain else ''}"]

    return get


def text(count: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def run(decoder: Decoder, tokens: Tensor, width: int, options: CacheOptions = FLOATS) -> Tensor:
    """The logits of all tokens, `width` of them in a forward."""
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache(options.kind, options.pages)
    request, found = cache.open(len(tokens)), []
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        found.append(decoder.forward(piece, Rows.chains([(request, start, len(piece))]), cache).logits)
    return torch.cat(found)


def transformers_logits(path: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        found: Tensor = model(tokens.view(1, -1)).logits[0]
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def tree_after(decoder: Decoder, before: Tensor, options: CacheOptions) -> None:
    """Each row of a tree has the logits of its chain, and keeping a path leaves that chain's cache."""
    assert isinstance(decoder, BaseDecoder)
    tokens, count = text(len(PARENTS), seed=9), len(before)
    cache = decoder.new_cache(options.kind, options.pages)
    request = cache.open(count + 10)
    decoder.forward(before, Rows.chains([(request, 0, count)]), cache)
    rows = Rows(torch.full((7,), request), torch.tensor(DEPTHS) + count, torch.tensor(PARENTS))
    tree = decoder.forward(tokens, rows, cache).logits
    path = [0, 2, 4, 6]
    chain = run(decoder, torch.cat((before, tokens[path], before[:3])), 16, options)
    assert torch.equal(tree[path], chain[count : count + 4])
    cache.keep(request, count, path)
    more = decoder.forward(before[:3], Rows.chains([(request, count + 4, 3)]), cache).logits
    assert torch.equal(more, chain[count + 4 :])


def together(decoder: Decoder, texts: list[Tensor], options: CacheOptions) -> None:
    """Texts in one batch have the logits that each has alone."""
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache(options.kind, options.pages)
    handles = [cache.open(len(one)) for one in texts]
    rows = Rows.chains([(handle, 0, len(one)) for handle, one in zip(handles, texts, strict=True)])
    both = decoder.forward(torch.cat(texts), rows, cache).logits
    assert torch.equal(both, torch.cat([run(decoder, one, 16, options) for one in texts]))


def test_the_table_has_every_family() -> None:
    assert set(FAMILIES) == set(KNOWN) - set(LLAMA)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family(made: Made, kind: str) -> None:
    """What always runs: transformers' logits, the reference's bits, at three widths, in a tree and in a batch."""
    tokens, path = text(WINDOW + 13), made(kind)
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    whole = run(decoder, tokens, len(tokens))
    assert relative(whole, transformers_logits(path, tokens)) < 1e-4
    for width in (1, 5):
        assert torch.equal(run(decoder, tokens, width), whole), width
    if decoder.exact:
        # The last row depends on what all before it left in the cache.
        reference = load(path, kernels="reference").decoder
        assert torch.equal(run(reference, tokens, len(tokens)), whole)
    tree_after(decoder, tokens, CacheOptions("int4", 4))
    together(decoder, [tokens, text(7)], CacheOptions("int8"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_width_and_cache(made: Made, kind: str, scheme: str) -> None:
    """200 tokens past the window: all widths of one kind of cache, some of the others."""
    tokens, path = text(WINDOW + 203), made(kind, scheme)
    decoder = load(path, threads=2).decoder
    assert isinstance(decoder, BaseDecoder)
    plain = transformers_logits(made(kind, scheme, plain=True), tokens)
    found = run(decoder, tokens, 64)
    if scheme == "float32":
        assert relative(found, plain) < 1e-4
    elif decoder.architecture.experts is None and not any(decoder.architecture.state_sizes):
        # Packed layers round their inputs to int8, which transformers' do not.
        assert relative(found, plain) < 0.1
    else:
        # So some rows go to other experts, or find a state that is further off: most do not.
        assert float(((found - plain).norm(dim=1) / plain.norm(dim=1)).median()) < 0.1
    for cached in KINDS:
        contiguous, paged = CacheOptions(cached), CacheOptions(cached, 12)
        whole = run(decoder, tokens, len(tokens), contiguous)
        for width in range(1, 17) if cached == ALL_WIDTHS[scheme] else (3, 16):
            assert torch.equal(run(decoder, tokens, width, contiguous), whole), (cached, width)
        assert torch.equal(run(decoder, tokens, 7, paged), whole)
        for options in (contiguous, paged):
            tree_after(decoder, tokens, options)
            together(decoder, [tokens, text(70, 2), text(9, 3)], options)
    short, options = tokens[: WINDOW + 40], CacheOptions(ALL_WIDTHS[scheme])
    # Two threads of torch's take a hundred times as long for its small sums where others use the machine, too.
    want = run(load(path, kernels="reference", threads=1).decoder, short, 60, options)
    assert torch.equal(run(decoder, short, 60, options), want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_speculation_gives_the_plain_text(made: Made, kind: str) -> None:
    """By lookup, by a model and by trees; the draft is the model itself, quantised: often right, not always."""
    target, draft = load(made(kind), threads=2), load(made(kind, "int4"), threads=2)
    prompts = [text(30, seed).tolist() for seed in (4, 5)]

    def texts(drafter: object, options: CacheOptions) -> list[list[int]]:
        speculator = Speculator(target, drafter, draft_length=4, cache=options)  # type: ignore[arg-type]
        return [list(result.tokens) for result in speculator.generate(prompts, max_new_tokens=WINDOW + 20)]

    for options in (FLOATS, *(CacheOptions(cached, 12) for cached in KINDS)):
        want = texts(None, options)
        for drafter in (LookupDrafter(), ModelDrafter(draft), TreeDrafter(draft)):
            assert texts(drafter, options) == want, (options, drafter.name)
