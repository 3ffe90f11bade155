"""Texts with a known beginning go on from a snapshot of the states, to the bits of reading them whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.cache import snapshots
from runtime.cache.paged import PagedCache
from runtime.cache.snapshots import Snapshots, bytes_of_snapshots, most_snapshots
from runtime.contract import Rows
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.runtime.model.families import write
from tests.runtime.model.test_families import run, text

PIECE = 90


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A delta rule, and a state space beside attention."""
    yield write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def decoder(path: Path) -> BaseDecoder:
    found = load(path, threads=1).decoder
    assert isinstance(found, BaseDecoder)
    return found


def read(decoder: BaseDecoder, cache: PagedCache, tokens: Tensor, salt: str = "") -> tuple[int, int, Tensor]:
    """A new request with this text: its handle, the tokens that were known, and the logits of the others."""
    request, length = cache.open(len(tokens) + 64), len(tokens)
    known, found = cache.match_prefix(request, tokens.tolist(), salt), []
    while (at := cache.length(request)) < length:
        end = cache.piece_end(request, min(at + PIECE, length), length)
        found.append(decoder.forward(tokens[at:end], Rows.chains([(request, at, end - at)]), cache).logits)
    cache.cache_prefix(request, tokens.tolist(), salt)
    return request, known, torch.cat(found)


def paged(decoder: BaseDecoder, pages: int = 30) -> PagedCache:
    found = decoder.new_cache("float32", pages)
    assert isinstance(found, PagedCache)
    return found


def test_a_text_goes_on_from_the_last_full_page_of_one_like_it(decoder: BaseDecoder) -> None:
    cache, first = paged(decoder), text(150)
    want = run(decoder, first, 150)
    request, known, found = read(decoder, cache, first)
    assert known == 0 and torch.equal(found, want)
    for length in (150, 129, 128, 140):
        again = torch.cat((first[:length], text(20, seed=length)))
        other, known, found = read(decoder, cache, again)
        assert known == 128 and torch.equal(found, run(decoder, again, 180)[128:])
        # Back beyond the snapshot, where the text is read again, and on from there.
        cache.truncate(other, 100)
        tail = text(9, seed=5)
        rows = Rows.chains([(other, 100, 9)])
        assert torch.equal(
            decoder.forward(tail, rows, cache).logits, run(decoder, torch.cat((again[:100], tail)), 120)[100:]
        )
        cache.close(other)
    assert read(decoder, cache, first, salt="another")[1] == 0
    # What wrote over its own pages has not changed those that are known.
    assert read(decoder, cache, first)[1] == 128
    cache.close(request)
    assert read(decoder, cache, first)[1] == 128


def test_where_texts_part_a_snapshot_is_taken(decoder: BaseDecoder) -> None:
    """The second text with a common beginning is read whole, with a stop where it parts; the third begins there."""
    cache, common = paged(decoder, 40), text(70)
    for number, expected in enumerate((0, 0, 64, 64)):
        own = torch.cat((common, text(100, seed=number)))
        _, known, found = read(decoder, cache, own)
        assert known == expected and torch.equal(found, run(decoder, own, 180)[expected:]), number


def test_they_are_few_and_go_with_their_pages(decoder: BaseDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_BYTES", 0)
    monkeypatch.setattr(snapshots, "_LEAST", 2)
    cache, texts = paged(decoder, 8), [text(100, seed) for seed in range(3)]
    for one in (*texts, texts[2], texts[1]):
        request, _, found = read(decoder, cache, one)
        cache.close(request)
        assert len(cache._snapshots) <= 2
    assert read(decoder, cache, texts[1])[1] == 64
    # A text of all pages takes theirs.
    request, known, found = read(decoder, cache, whole := text(64 * 6 - 5, seed=9))
    assert known == 0 and torch.equal(found, run(decoder, whole, 400))
    cache.close(request)
    assert read(decoder, cache, texts[0])[1] == 0


def test_a_few_large_ones_or_many_small_ones() -> None:
    assert most_snapshots(1 << 40) == 4 and bytes_of_snapshots(1 << 40) == 1 << 44
    assert bytes_of_snapshots(1000) <= 1 << 28 < bytes_of_snapshots(1000) + 4000
    kept = Snapshots(1 << 40)
    for page in range(6):
        kept.add(page, torch.full((3,), float(page)))
    assert [page in kept for page in range(6)] == [False, False, True, True, True, True]
    kept.use(2)
    kept.add(6, torch.zeros(3))
    assert 2 in kept and 3 not in kept and kept.use(2).tolist() == [2.0] * 3
    kept.move(2, 9)
    kept.move(9, 4)
    kept.drop(6)
    assert [page for page in range(10) if page in kept] == [4, 5, 9] and kept.use(4).tolist() == [4.0] * 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_conversation_is_not_read_again(path: Path, temperature: float) -> None:
    """Each turn begins with the text so far: with drafts, from snapshots, it is what plain decoding makes of it."""
    target, sampling, reused = load(path, threads=1), Sampling(temperature=temperature, seed=3), []
    serving = Speculator(target, LookupDrafter(), draft_length=4, cache=CacheOptions("int8", 40))
    turn = text(70).tolist()
    for number in range(3):
        prompts = [turn, turn[:40] + text(30, seed=number).tolist()]
        plain = Speculator(target, cache=CacheOptions("int8")).generate(prompts, 70, sampling, stop=())
        found = serving.generate(prompts, 70, sampling, stop=())
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        reused.append(found[0].metrics.reused_tokens)
        turn = [*turn, *found[0].tokens, *text(10, seed=number).tolist()]
    assert reused == [0, 128, 192]
