"""The paged cache: pages are taken, shared, copied, known and given back; forwards have the contiguous cache's bits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.cache.block_pool import ROOT, BlockPool, Prefix
from runtime.cache.contiguous import KeyValueCache
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import CacheFormat
from runtime.contract import Rows
from runtime.errors import OutOfPages, UserError
from runtime.kv_store import CacheKind

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
LAYERS, HEADS, DIM = 2, 3, 20


def make(pages: int = 6, kind: CacheKind = "float32") -> PagedCache:
    return PagedCache(CacheFormat(LAYERS, HEADS, DIM, torch.device("cpu"), kind), pages)


def content(tokens: list[int], first: int = 0) -> Tensor:
    """Keys and values of tokens from a position on, a function of token and position: (2, LAYERS, n, HEADS, DIM)."""
    draws = [
        torch.randn(2, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(1000 * token + first + i))
        for i, token in enumerate(tokens)
    ]
    return torch.stack(draws, dim=2) if draws else torch.empty(2, LAYERS, 0, HEADS, DIM)


def append(cache: KeyValueCache, request: int, tokens: list[int]) -> None:
    start = cache.reserve(request, len(tokens))
    both = content(tokens, start)
    for layer in range(LAYERS):
        cache.write(layer, request, start, both[0, layer], both[1, layer])


def holds(cache: KeyValueCache, request: int, tokens: list[int]) -> bool:
    """Whether the request reads as a cache of its own, of the same kind, that was only ever given these tokens."""
    other = make(8, cache.format.kind)
    twin = other.open(max(1, len(tokens)))
    append(other, twin, tokens)
    return cache.length(request) == len(tokens) and all(
        torch.equal(a, b) for a, b in zip(stored(cache, request), stored(other, twin), strict=True)
    )


def stored(cache: KeyValueCache, request: int) -> list[Tensor]:
    length = cache.length(request)
    parts = [part for layer in range(cache.format.layers) for part in cache.read(layer, request, length)]
    return [part.transpose(1, 2).flatten(0, 1)[:length] for part in parts]


def line(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Pages.


def test_pages_come_with_rows_and_go_with_them() -> None:
    cache = make()
    first, second = cache.open(300), cache.open(384)
    assert (cache.pages, cache.pages_free) == (6, 6) and cache.capacity(first) == 320
    append(cache, first, line(64))
    assert cache.pages_free == 5
    append(cache, first, line(1))
    append(cache, second, line(130))
    assert cache.pages_free == 1 and not set(cache.table(first)) & set(cache.table(second))
    cache.truncate(second, 64)
    assert cache.pages_free == 3
    cache.truncate(second, 0)
    cache.close(first)
    assert cache.pages_free == 6 and cache.table(second) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_whose_pages_lie_between_each_other(kind: CacheKind) -> None:
    cache = make(8, kind)
    texts = [line(200, 1), line(180, 2)]
    handles = [cache.open(200) for _ in texts]
    for first in range(0, 200, 37):
        for handle, text in zip(handles, texts, strict=True):
            append(cache, handle, text[first : first + 37])
    assert cache.pages_free == 1
    assert all(holds(cache, handle, text) for handle, text in zip(handles, texts, strict=True))
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:70]
    for part, whole in zip(cache.gather(1, handles[0], slots), stored(cache, handles[0])[2:], strict=True):
        assert torch.equal(part.transpose(1, 2).flatten(0, 1)[:70], whole[slots])
        assert not part[1, :, 6:].any()


def test_what_a_request_left_in_a_page_is_not_read_again() -> None:
    cache = make(1)
    handle = cache.open(64)
    cache.reserve(handle, 64)
    for layer in range(LAYERS):
        cache.write(layer, handle, 0, *torch.full((2, 64, HEADS, DIM), torch.inf))
    cache.truncate(handle, 0)
    append(cache, handle, line(10))
    # An infinity beside a weight of 0 is no number, so the reference must not meet one behind the last key.
    assert not cache.read(0, handle, 10)[1][:, :, 10:].any()
    assert holds(cache, handle, line(10))


def test_a_cache_too_small_for_one_request_and_other_sizes_that_cannot_be() -> None:
    cache = make(3)
    assert cache.open(192) == 0
    with pytest.raises(UserError, match="too small for one request: 193 tokens need 4 pages of 64, and it has 3"):
        cache.open(193)
    with pytest.raises(UserError, match="at least 1 token, 0"):
        cache.open(0)
    with pytest.raises(UserError, match="at least 1 page, 0"):
        make(0)
    with pytest.raises(UserError, match="GB, which this machine refused"):
        make(10**12)
    assert cache.pages_free == 3 and cache.open(1) == 1


def test_running_out_changes_nothing_and_says_how_much_is_lacking() -> None:
    cache = make(3)
    first, second = cache.open(192), cache.open(192)
    append(cache, first, line(100))
    append(cache, second, line(30))
    assert [cache.missing_pages({first: n}) for n in (0, 1, 28, 29, 92)] == [0, 0, 0, 1, 1]
    assert cache.missing_pages({first: 29, second: 35}) == 2 and cache.missing_pages({second: 34}) == 0
    with pytest.raises(OutOfPages, match="lacks 1 pages of 64 tokens"):
        cache.reserve(first, 29)
    assert holds(cache, first, line(100)) and cache.pages_free == 0
    cache.close(second)
    append(cache, first, line(29, 5))
    assert cache.pages_free == 0


# Copies on write.


@pytest.mark.parametrize("kind", KINDS)
def test_forks_share_until_they_write(kind: CacheKind) -> None:
    cache = make(6, kind)
    first = cache.open(192)
    append(cache, first, line(100))
    second = cache.fork(first)
    assert cache.table(first) == cache.table(second) and cache.pages_free == 4
    assert [cache.holders(page) for page in cache.table(first)] == [2, 2]
    append(cache, second, line(5, 1))
    append(cache, first, line(60, 2))
    assert cache.pages_free == 2 and cache.table(first)[0] == cache.table(second)[0]
    assert holds(cache, first, line(100) + line(60, 2)) and holds(cache, second, line(100) + line(5, 1))
    cache.close(first)
    assert holds(cache, second, line(100) + line(5, 1)) and cache.pages_free == 4


def test_the_last_writer_of_a_shared_page_needs_no_copy() -> None:
    cache = make(4)
    handles = [cache.open(100)]
    append(cache, handles[0], line(100))
    handles += [cache.fork(handles[0]) for _ in range(3)]
    assert cache.pages_free == 2
    assert [cache.missing_pages(dict.fromkeys(handles[:n], 1)) for n in range(5)] == [0, 0, 0, 1, 1]
    cache.close(handles[3])
    assert cache.missing_pages(dict.fromkeys(handles[:3], 1)) == 0
    for seed, handle in enumerate(handles[:3]):
        append(cache, handle, [seed])
    assert cache.pages_free == 0 and all(holds(cache, h, [*line(100), seed]) for seed, h in enumerate(handles[:3]))
    # In the shared first page, a lack leaves everything as it was.
    with pytest.raises(OutOfPages):
        cache.keep(handles[0], 10, [20])
    assert holds(cache, handles[0], [*line(100), 0])


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_a_path_leaves_a_fork_its_slots(kind: CacheKind) -> None:
    cache = make(8, kind)
    first, text = cache.open(130), line(130)
    append(cache, first, text)
    before = stored(cache, first)
    second = cache.fork(first)
    for start, path in ((60, [9, 0, 3, 68, 1]), (126, [3, 2])):
        kept = [*range(start), *(start + step for step in path)]
        cache.keep(second, start, path)
        assert all(torch.equal(a, b[kept]) for a, b in zip(stored(cache, second), before, strict=True))
        assert holds(cache, first, text)
        cache.close(second)
        second = cache.fork(first)
    # Nothing moves: nothing is copied.
    cache.keep(second, 100, [0, 1, 2])
    assert cache.table(second) == cache.table(first)[:2]


# Known prefixes.


def test_full_pages_are_adopted_as_far_as_they_are_known() -> None:
    cache, text = make(8), line(200)
    first = cache.open(200)
    append(cache, first, text)
    cache.cache_prefix(first, text)
    for asked, got in (
        (text, 192),
        (text[:192], 128),
        (text[:193], 192),
        (text[:64], 0),
        (text[:1], 0),
        ([], 0),
        ([*text[:100], 301, *text[101:]], 64),
        ([301, *text[1:]], 0),
        (text[64:], 0),
    ):
        handle = cache.open(256)
        assert cache.match_prefix(handle, asked) == cache.length(handle) == got
        assert cache.table(handle) == cache.table(first)[: got // 64]
        append(cache, handle, asked[got:])
        assert holds(cache, handle, asked)
        cache.close(handle)
    small = cache.open(70)
    assert cache.match_prefix(small, text) == 128  # its capacity is two whole pages
    with pytest.raises(ValueError, match="only an empty one can match"):
        cache.match_prefix(first, text)
    with pytest.raises(ValueError, match="201 tokens are to be cached, and 200 are stored"):
        cache.cache_prefix(first, [*text, 1])
    with pytest.raises(ValueError, match="known to hold other tokens"):
        cache.cache_prefix(first, [301, *text[1:]])


def test_known_pages_outlive_their_request_and_the_end_of_a_text_goes_first() -> None:
    cache, text = make(3), line(190)
    first = cache.open(192)
    append(cache, first, text)
    cache.cache_prefix(first, text)
    cache.close(first)
    assert cache.pages_free == 3
    other = cache.open(192)
    append(cache, other, line(120, 9))  # the page that was not full, and one of the two known
    again = cache.open(192)
    assert cache.match_prefix(again, text) == 64 and cache.pages_free == 0
    append(cache, other, line(8, 10))
    with pytest.raises(OutOfPages):
        append(cache, other, [1])
    assert holds(cache, again, text[:64])
    cache.close(again)
    assert cache.pages_free == 1
    append(cache, other, [1])
    assert cache.match_prefix(cache.open(192), text) == 0
    assert holds(cache, other, [*line(120, 9), *line(8, 10), 1])


def test_the_page_let_go_first_is_taken_first() -> None:
    cache, texts = make(3), [line(64, seed) for seed in range(3)]
    handles = [cache.open(65) for _ in texts]
    for handle, text in zip(handles, texts, strict=True):
        append(cache, handle, text)
        cache.cache_prefix(handle, text)
    for i in (1, 0, 2):
        cache.close(handles[i])
    # Adopting text 1 makes it the latest; then text 0 is the one to go.
    reader = cache.open(128)
    assert cache.match_prefix(reader, [*texts[1], 1]) == 64
    cache.close(reader)
    writer = cache.open(64)
    append(cache, writer, line(3, 7))
    found = []
    for text in texts:
        reader = cache.open(128)
        found.append(cache.match_prefix(reader, [*text, 1]))
        cache.close(reader)
    assert found == [0, 64, 64]


@pytest.mark.parametrize("holder", [False, True], ids=["alone", "adopted"])
def test_a_known_page_that_is_written_again_gives_nobody_wrong_keys(holder: bool) -> None:
    cache, text = make(6), line(70)
    first = cache.open(128)
    append(cache, first, text)
    cache.cache_prefix(first, text)
    reader = cache.open(128)
    if holder:
        assert cache.match_prefix(reader, text) == 64
    cache.truncate(first, 40)
    changed = text[:40] + line(30, 8)
    append(cache, first, changed[40:])
    late = cache.open(128)
    # Who had taken it over keeps it known; else it is forgotten.
    assert cache.match_prefix(late, text) == (64 if holder else 0)
    assert holds(cache, first, changed) and holds(cache, late, text[: 64 if holder else 0])
    if holder:
        assert holds(cache, reader, text[:64])
    cache.cache_prefix(first, changed)
    last = cache.open(128)
    assert cache.match_prefix(last, changed) == 64 and holds(cache, last, changed[:64])


def test_the_same_text_twice_is_known_once_and_its_continuations_both() -> None:
    cache, text = make(8), line(64)
    handles = [cache.open(192) for _ in range(2)]
    for seed, handle in enumerate(handles):
        append(cache, handle, text + line(64, 20 + seed))
    for seed, handle in enumerate(handles):
        cache.cache_prefix(handle, text + line(64, 20 + seed))
    for seed in range(2):
        reader = cache.open(192)
        assert cache.match_prefix(reader, [*text, *line(64, 20 + seed), 1]) == 128
        assert cache.table(reader) == (cache.table(handles[0])[0], cache.table(handles[seed])[1])
        assert holds(cache, reader, text + line(64, 20 + seed))


def test_a_prefix_that_was_lost_and_came_back_reaches_its_continuation_again() -> None:
    """A page is known by its whole chain: published anew after its parent's page was taken and computed again."""
    pages = BlockPool(3)
    parent, child = pages.take(), pages.take()
    number = pages.know(parent, Prefix(ROOT, b"a"))
    pages.know(child, Prefix(number, b"b"))
    pages.release(parent)
    for _ in range(2):
        pages.take()  # the free one, then the parent's
    assert pages.find(Prefix(ROOT, b"a")) is None and pages.free == 0
    again = pages.know(parent, Prefix(ROOT, b"a"))
    assert again != number and pages.find(Prefix(again, b"b")) is None
    pages.know(child, Prefix(again, b"b"))
    assert pages.find(Prefix(again, b"b")) is not None and pages.find(Prefix(number, b"b")) is None
    with pytest.raises(OutOfPages):
        pages.take()
    pages.release(child)
    with pytest.raises(ValueError, match="held by no request"):
        pages.release(child)


class SameHash(bytes):
    """Bytes whose hashes are all equal."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_are_not_equal_tokens() -> None:
    pages = BlockPool(2)
    page = pages.take()
    pages.know(page, Prefix(ROOT, SameHash(b"a")))
    assert pages.find(Prefix(ROOT, SameHash(b"b"))) is None
    assert pages.find(Prefix(ROOT, SameHash(b"a"))) == (page, ROOT + 1)


# Forwards.

TREE = [-1, 0, 0, 1, 2, 2, 4, -1, 7, 6]


def forwards(decoder: Any, cache: KeyValueCache, text: Text) -> list[Tensor]:
    """Logits of chains, batches, a tree beside a chain, rollbacks and a fork, and what the cache holds in between."""
    out: list[Tensor] = []

    def run(tokens: Tensor, rows: Rows) -> None:
        out.append(decoder.forward(tokens, rows, cache).logits)

    def chain(spans: Mapping[int, int], seed: int) -> None:
        tokens = [text(count, seed=seed + handle) for handle, count in spans.items()]
        run(torch.cat(tokens), Rows.chains([(h, cache.length(h), count) for h, count in spans.items()]))

    first, second = cache.open(240), cache.open(200)
    chain({first: 30}, 1)
    chain({second: 70}, 2)
    for seed in range(3):
        chain({first: 33, second: 1}, 3 + seed)
    base, beside = cache.length(first), cache.length(second)
    depth: list[int] = []
    for parent in TREE:
        depth.append(base if parent < 0 else depth[parent] + 1)
    count = len(TREE)
    request, position = [first] * count + [second] * 4, [*depth, *range(beside, beside + 4)]
    parents = [*TREE, -1, count, count + 1, count + 2]
    run(text(count + 4, seed=9), Rows(*(torch.tensor(part) for part in (request, position, parents))))
    cache.keep(first, base, [0, 2, 4, 6, 9])
    out += stored(cache, first)
    third = cache.fork(first)
    for handle in (first, third, second):
        chain({handle: 3}, 30)
    cache.truncate(first, 60)
    chain({first: 80, third: 5}, 40)
    for handle in (first, second, third):
        out += stored(cache, handle)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "mistral", "int4"])
def test_forwards_from_pages_have_the_contiguous_caches_bits(
    tiny: Tiny, tiny_packed: Callable[[str], Path], text: Text, native_path: str, model: str, kind: CacheKind
) -> None:
    path = tiny_packed(model) if model == "int4" else tiny(model)
    decoder = load(path, kernels=native_path).decoder
    same_bits(decoder, text, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_reads_pages_as_it_reads_blocks(tiny: Tiny, text: Text, kind: CacheKind) -> None:
    same_bits(load(tiny("llama"), kernels="plain-torch").decoder, text, kind)


def same_bits(decoder: Any, text: Text, kind: CacheKind) -> None:
    paged = decoder.new_cache(kind, pages=13)
    assert isinstance(paged, PagedCache)
    # Pages in no order, with what others left in them.
    for seed, count in ((50, 130), (51, 200), (52, 10)):
        decoder.forward(text(count, seed=seed), Rows.chains([(paged.open(count), 0, count)]), paged)
    for handle in (1, 0, 2):
        paged.close(handle)
    ours, theirs = forwards(decoder, paged, text), forwards(decoder, decoder.new_cache(kind), text)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert paged.table(0) != tuple(range(len(paged.table(0))))


def test_a_wrong_page_would_be_noticed(tiny: Tiny, text: Text, kernels: str) -> None:
    """The positive of the tests above: a table the other way round shows in the logits."""
    decoder = load(tiny("llama"), kernels=kernels).decoder
    cache = decoder.new_cache("float32", pages=3)  # type: ignore[call-arg]
    handle = cache.open(192)
    decoder.forward(text(150), Rows.chains([(handle, 0, 150)]), cache)
    logits = []
    for _ in range(2):
        logits.append(decoder.forward(text(3), Rows.chains([(handle, 150, 3)]), cache).logits)
        cache.truncate(handle, 150)
        table = cache.store(handle).table  # type: ignore[attr-defined]
        table.copy_(table.flip(0))
    assert not torch.equal(*logits)


def test_a_forward_that_lacks_pages_takes_none(tiny: Tiny, text: Text, kernels: str) -> None:
    decoder = load(tiny("llama"), kernels=kernels).decoder
    cache = decoder.new_cache("float32", pages=3)  # type: ignore[call-arg]
    assert isinstance(cache, PagedCache)
    first, second = cache.open(128), cache.open(128)
    decoder.forward(text(60), Rows.chains([(first, 0, 60)]), cache)
    before = stored(cache, first)
    assert cache.missing_pages({first: 5, second: 65}) == 1
    with pytest.raises(OutOfPages, match="lacks 1 pages"):
        decoder.forward(text(70), Rows.chains([(first, 60, 5), (second, 0, 65)]), cache)
    assert (cache.length(first), cache.length(second), cache.pages_free) == (60, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(stored(cache, first), before, strict=True))
    decoder.forward(text(69), Rows.chains([(first, 60, 5), (second, 0, 64)]), cache)
    assert cache.pages_free == 0


def test_an_adopted_prefix_gives_the_same_logits(tiny: Tiny, text: Text, kernels: str) -> None:
    decoder = load(tiny("llama"), kernels=kernels).decoder
    cache = decoder.new_cache("int8", pages=6)  # type: ignore[call-arg]
    first, second, tokens = cache.open(150), cache.open(150), text(150)
    want = decoder.forward(tokens, Rows.chains([(first, 0, 150)]), cache).logits
    cache.cache_prefix(first, tokens.tolist())
    known = cache.match_prefix(second, tokens.tolist())
    assert known == 128
    rows = Rows.chains([(second, known, 150 - known)])
    assert torch.equal(decoder.forward(tokens[known:], rows, cache).logits, want[known:])
