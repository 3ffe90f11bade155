"""Caches under any sequence of appends, trees, truncations, forks, adoptions and evictions, against fresh prefills.

After every step each live request's codes and scales are those of a cache that was only ever given its tokens, and
the pages add up.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from runtime import load
from runtime.cache.block_pool import BlockPool
from runtime.cache.contiguous import KeyValueCache
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import CacheFormat
from runtime.contract import Out, Rows, integers
from runtime.errors import OutOfPages
from runtime.kv_store import CacheKind
from runtime.model.triton.cache import GpuCache

KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
CAPACITY, PAGES, REQUESTS = 200, 6, 4
# Lengths: any, and often those around the borders of pages.
LENGTHS = st.integers(0, CAPACITY) | st.sampled_from([1, 63, 64, 65, 127, 128, 129, 150, CAPACITY])
PROMPTS = st.sampled_from([70, 129, 140, CAPACITY, 1]) | st.integers(1, CAPACITY)
Tokens = tuple[int, ...]


def line(seed: int) -> Tokens:
    return tuple(torch.randint(1, 320, (CAPACITY,), generator=torch.Generator().manual_seed(seed)).tolist())


# Texts that requests begin with; they part after 100 tokens, so one page of theirs is the same.
BASES = [line(1), line(1)[:100] + line(2)[100:]]


def bits(cache: KeyValueCache, request: int) -> list[Tensor]:
    """Codes and scales of the request's slots, which come first."""
    store, length = cache.store(request), cache.length(request)
    slots = store.physical(torch.arange(length))
    block, inside = slots // 64, slots % 64
    keys, values = store.keys, store.values
    if cache.format.kind == "int4":
        keys, values = (torch.cat((part & 15, part >> 4), dim=-1) for part in (keys, values))
    out = [keys[:, block, :, :, inside], values[:, block, :, inside, : cache.format.head_dim]]
    if cache.format.kind != "float32":
        out += [scale[:, block, :, inside] for scale in (store.key_scale, store.value_scale)]
    return out


class Machine(RuleBasedStateMachine):
    """Requests of one cache, and the tokens that each of them should hold."""

    def __init__(self, decoder: Any, kind: CacheKind, pages: int | None, fresh: dict[Tokens, list[Tensor]]):
        super().__init__()
        self.decoder, self.kind, self.fresh = decoder, kind, fresh
        self.cache: KeyValueCache = decoder.new_cache(kind, pages)
        self.texts: dict[int, Tokens] = {}

    def want(self, text: Tokens) -> list[Tensor]:
        """The state after one prefill of the text in a cache of its own."""
        if text not in self.fresh:
            cache = self.decoder.new_cache(self.kind)
            handle = cache.open(CAPACITY)
            if text:
                self.decoder.forward(integers(text), Rows.chains([(handle, 0, len(text))]), cache, integers([]))
            self.fresh[text] = bits(cache, handle)
        return self.fresh[text]

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)), label="request")

    def forward(self, tokens: Tokens, rows: Rows, needs: dict[int, int]) -> bool:
        """Runs the rows, or sees them refused for exactly the pages that `missing_pages` says; whether they ran."""
        if self.cache.missing_pages(needs):
            with pytest.raises(OutOfPages, match=f"lacks {self.cache.missing_pages(needs)} pages"):
                self.decoder.forward(integers(tokens), rows, self.cache, integers([]))
            return False
        self.decoder.forward(integers(tokens), rows, self.cache, integers([]))
        return True

    def append(self, more: dict[int, Tokens]) -> None:
        rows = Rows.chains([(handle, len(self.texts[handle]), len(tokens)) for handle, tokens in more.items()])
        joined = tuple(token for tokens in more.values() for token in tokens)
        if self.forward(joined, rows, {handle: len(tokens) for handle, tokens in more.items()}):
            for handle, tokens in more.items():
                self.texts[handle] += tokens

    def continued(self, data: st.DataObject, handle: int) -> Tokens:
        """Some tokens that fit behind a request's: of a base, as of a repeated prompt, or of its own."""
        start = len(self.texts[handle])
        base = data.draw(st.sampled_from([*BASES, line(3)]), label="base")
        return base[start : start + data.draw(LENGTHS, label="count")]

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.open(data, True)

    @precondition(lambda self: len(self.texts) < REQUESTS)
    @rule(data=st.data(), published=st.booleans())
    def open(self, data: st.DataObject, published: bool) -> None:
        text = data.draw(st.sampled_from(BASES), label="base")[: data.draw(PROMPTS, label="count")]
        handle = self.cache.open(CAPACITY)
        assert handle not in self.texts
        known = self.cache.match_prefix(handle, text)
        assert known % 64 == 0 and known == self.cache.length(handle) < len(text)
        self.texts[handle] = text[:known]
        self.append({handle: text[known:]})
        if published:
            self.cache.cache_prefix(handle, self.texts[handle])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def append_chains(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, unique=True), label="requests")
        more = {handle: self.continued(data, handle) for handle in handles}
        self.append({handle: tokens for handle, tokens in more.items() if tokens})

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), variant=st.integers(0, 9), forked=st.booleans())
    def append_tree(self, data: st.DataObject, variant: int, forked: bool) -> None:
        """A tree and then one of its paths, or two of them on a request and its fork."""
        handle = self.one(data)
        text = self.texts[handle]
        size = min(data.draw(st.integers(1, 12), label="size"), CAPACITY - len(text))
        parents = [data.draw(st.integers(-1, i - 1), label="parent") for i in range(size)]
        ways: list[list[int]] = []
        for i, parent in enumerate(parents):
            ways.append([*(ways[parent] if parent >= 0 else []), i])
        positions = [len(text) + len(way) - 1 for way in ways]
        tokens = torch.randint(1, 320, (size,), generator=torch.Generator().manual_seed(variant)).tolist()
        rows = Rows(integers([handle] * size), integers(positions), integers(parents))
        if not size or not self.forward(tuple(tokens), rows, {handle: size}):
            return
        branches = [handle]
        if forked and len(self.texts) < REQUESTS:
            branches.append(self.cache.fork(handle))
            self.texts[branches[1]] = text
        for branch in branches:
            way = data.draw(st.sampled_from([[], *ways]), label="path")
            try:
                self.cache.keep(branch, len(text), way)
            except OutOfPages:
                # Only to part from a fork; then the last token before the tree is all that can be gone back to.
                assert len(branches) > 1
                self.cache.truncate(branch, len(text))
                way = []
            self.texts[branch] = text + tuple(tokens[i] for i in way)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.one(data)
        length = min(data.draw(LENGTHS, label="length"), len(self.texts[handle]))
        self.cache.truncate(handle, length)
        self.texts[handle] = self.texts[handle][:length]

    @precondition(lambda self: 0 < len(self.texts) < REQUESTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        handle = self.one(data)
        other = self.cache.fork(handle)
        assert other not in self.texts
        self.texts[other] = self.texts[handle]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        handle = self.one(data)
        self.cache.cache_prefix(handle, self.texts[handle])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), again=st.booleans())
    def close(self, data: st.DataObject, again: bool) -> None:
        """What it published stays until it is evicted; another request may come for it at once."""
        handle = self.one(data)
        self.cache.cache_prefix(handle, self.texts[handle])
        self.cache.close(handle)
        del self.texts[handle]
        if again:
            self.open(data, True)

    @invariant()
    def every_request_is_a_fresh_prefill(self) -> None:
        for handle, text in self.texts.items():
            assert self.cache.length(handle) == len(text)
            assert all(torch.equal(a, b) for a, b in zip(bits(self.cache, handle), self.want(text), strict=True))

    @invariant()
    def pages_add_up(self) -> None:
        if not isinstance(self.cache, PagedCache):
            return
        held, total = Counter(page for handle in self.texts for page in self.cache.table(handle)), self.cache.pages
        assert all(self.cache.holders(page) == held[page] for page in range(total))
        assert self.cache.pages_free == total - len(held)
        if isinstance(self.cache, GpuCache):
            for handle in self.texts:
                pages, out = self.cache.table(handle), np.zeros((2, 4), np.int32)
                self.cache.tables([handle], 4, out)
                assert out[0].tolist()[: len(pages)] == list(pages) and out.max() <= self.cache.scratch == total
        assert all(len(self.cache.table(h)) == -(-len(text) // 64) for h, text in self.texts.items())

    def teardown(self) -> None:
        for handle in self.texts:
            self.cache.close(handle)
        if isinstance(self.cache, PagedCache):
            assert self.cache.pages_free == self.cache.pages


def play(decoder: Any, kind: CacheKind, pages: int | None, examples: int, **options: Any) -> None:
    # Sequences of its own for each kind and kernel, the same ones every time.
    machine = seed(KINDS.index(kind) + 3 * len(decoder.kernels))(partial(Machine, decoder, kind, pages, {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [PAGES, None], ids=["paged", "contiguous"])
def test_any_sequence_leaves_what_a_fresh_prefill_leaves(
    tiny: Callable[..., Path], kernels: str, pages: int | None, kind: CacheKind
) -> None:
    play(load(tiny("llama"), kernels=kernels).decoder, kind, pages, 6 if kernels == "plain-torch" else 20)


def test_a_packed_model_too(tiny_packed: Callable[[str], Path], kernels: str) -> None:
    play(load(tiny_packed("int4"), kernels=kernels).decoder, "int8", PAGES, 6 if kernels == "plain-torch" else 20)


@dataclass
class OnPool:
    """A decoder with the cache of GPUs, whose pool lies in the same memory."""

    decoder: Any
    kernels: str = "plain-torch"

    def new_cache(self, kind: CacheKind, pages: int | None = None) -> KeyValueCache:
        a = self.decoder.architecture
        return GpuCache(CacheFormat(a.layers, a.kv_heads, a.head_dim, torch.device("cpu"), kind), pages)

    def forward(self, *arguments: Any) -> Out:
        return self.decoder.forward(*arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [PAGES, None], ids=["paged", "growing"])
def test_a_pool_that_grows_too(tiny: Callable[..., Path], pages: int | None, kind: CacheKind) -> None:
    play(OnPool(load(tiny("llama")).decoder), kind, pages, 20)


def test_a_copy_that_was_forgotten_is_found(
    tiny: Callable[..., Path], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive of the tests above: writing into shared pages."""
    monkeypatch.setattr(PagedCache, "_copy", lambda self, source, target: None)
    with pytest.raises(AssertionError):
        play(load(tiny("llama"), kernels=kernels).decoder, "float32", PAGES, 20, phases=[Phase.generate])


def test_a_page_that_leaks_is_found(tiny: Callable[..., Path], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release", lambda self, page: None)
    with pytest.raises(AssertionError):
        play(load(tiny("llama"), kernels=kernels).decoder, "float32", PAGES, 20, phases=[Phase.generate])
