"""Layers that carry a state: rolled back any distance, in chains and trees, texts go on as if it had never been."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.cache import states
from runtime.cache.contiguous import ContiguousCache, KeyValueCache
from runtime.cache.states import States
from runtime.contract import Rows
from runtime.model.base import BaseDecoder
from runtime.model.native import NativeDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.runtime.model.test_families import run, text

KINDS = ("lfm2", "qwen3_next", "qwen3_5_text", "mamba2", "nemotron_h", "falcon_h1")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model; all but convolutions begin with as few states as their megabytes would have them do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "lfm2":
            patch.setattr(states, "_LARGE", 0)
        yield write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


# The reference decoder's share takes most of a minute; test_families.py has its short texts in every run.
@pytest.fixture(scope="module", params=["auto", pytest.param("reference", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest, path: Path) -> BaseDecoder:
    found = load(path, threads=1, kernels=request.param).decoder
    assert isinstance(found, BaseDecoder)
    return found


def feed(
    decoder: BaseDecoder, cache: KeyValueCache, request: int, tokens: Tensor, asked: Tensor | None = None
) -> Tensor:
    rows = Rows.chains([(request, cache.length(request), len(tokens))])
    return decoder.forward(tokens, rows, cache, asked).logits


@pytest.mark.parametrize("pages", [None, 4])
def test_rolled_back_to_any_length(decoder: BaseDecoder, pages: int | None) -> None:
    """Within the states that are kept, and far beyond them."""
    tokens, other = text(100), text(20, seed=3)
    for length in (99, 97, 93, 80, 61, 1, 0):
        cache = decoder.new_cache("float32", pages)
        request = cache.open(140)
        feed(decoder, cache, request, tokens[:76], torch.tensor([75]))
        feed(decoder, cache, request, tokens[76:])
        cache.truncate(request, length)
        found = feed(decoder, cache, request, other)
        want = run(decoder, torch.cat((tokens[:length], other)), 120)[length:]
        assert torch.equal(found, want), length


def test_one_by_one_and_back(decoder: BaseDecoder) -> None:
    """A draft that is fed token by token, thrown away, and fed again, many times over."""
    tokens = text(60)
    want, cache = run(decoder, tokens, 60), decoder.new_cache()
    request = cache.open(100)
    for start in range(0, 60, 6):
        for token in text(start % 13, seed=start):
            feed(decoder, cache, request, token.view(1))
        cache.truncate(request, start)
        assert torch.equal(feed(decoder, cache, request, tokens[start : start + 6]), want[start : start + 6])


def test_a_wide_tree_behind_a_long_text(decoder: BaseDecoder) -> None:
    """Of more rows than states are kept; each has its chain's logits, and a path may be kept and rolled back."""
    tokens, count = text(50, seed=9), 40
    before = text(count)
    parents = [-1, -1, *(row // 2 for row in range(48))]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    cache = decoder.new_cache()
    request = cache.open(count + 60)
    feed(decoder, cache, request, before)
    rows = Rows(torch.full((50,), request), torch.tensor(depths) + count, torch.tensor(parents))
    tree = decoder.forward(tokens, rows, cache).logits
    for leaf in (49, 30, 1):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        want = run(decoder, torch.cat((before, tokens[path])), 64)
        assert torch.equal(tree[path], want[count:]), leaf
    path = [1, 5, 12, 27]
    assert [parents[row] for row in path[1:]] == [1, 5, 12]
    cache.keep(request, count, path)
    chain = torch.cat((before, tokens[path]))
    assert torch.equal(feed(decoder, cache, request, before[:3]), run(decoder, torch.cat((chain, before[:3])), 64)[-3:])
    cache.truncate(request, count + 2)
    assert torch.equal(
        feed(decoder, cache, request, before[:3]), run(decoder, torch.cat((chain[:42], before[:3])), 64)[-3:]
    )


@pytest.mark.parametrize("pages", [None, 8])
def test_copies_go_their_own_way(decoder: BaseDecoder, pages: int | None) -> None:
    tokens, ends = text(30), [text(5, seed) for seed in (3, 4)]
    cache = decoder.new_cache("float32", pages)
    first = cache.open(60)
    feed(decoder, cache, first, tokens)
    handles = [first, cache.fork(first)]
    for handle, end in zip(handles, ends, strict=True):
        feed(decoder, cache, handle, end[:2])
    for handle, end in zip(handles, ends, strict=True):
        want = run(decoder, torch.cat((tokens, end)), 64)[-3:]
        assert torch.equal(feed(decoder, cache, handle, end[2:]), want)
    assert cache.match_prefix(cache.open(60), tokens.tolist()) == 0


def test_greedy_chains_leave_their_states(path: Path) -> None:
    """What was drafted in one call, rolled back or not, is gone on from as what was fed."""
    decoder = load(path, threads=1).decoder
    if not isinstance(decoder, NativeDecoder):
        pytest.skip("only native decoders draft in one call")
    tokens = text(20)
    for length in (20, 24, 31):
        cache = decoder.new_cache()
        request = cache.open(100)
        drafted = decoder.continue_greedy(tokens, Rows.chains([(request, 0, 20)]), cache, [40], decoder.vocab_size)[0]
        whole = torch.cat((tokens, drafted))
        assert torch.equal(run(decoder, whole, 64).argmax(1)[19:-1], drafted)
        cache.truncate(request, length)
        found = feed(decoder, cache, request, tokens[:4])
        assert torch.equal(found, run(decoder, torch.cat((whole[:length], tokens[:4])), 64)[-4:]), length


def test_memory_of_states(path: Path) -> None:
    """Those of the longest draft so far, of as many floats as the record says; none for what is only read."""
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    a, cache = decoder.architecture, decoder.new_cache()
    least, floats = 2, 0
    if a.delta is not None:
        keys, values = a.delta.key_heads * a.delta.key, a.delta.value_heads * a.delta.value
        floats = (a.delta.taps - 1) * (2 * keys + values) + values * a.delta.key
    elif a.mamba is not None:
        values, vectors = a.mamba.heads * a.mamba.dim, a.mamba.groups * a.mamba.state
        floats = (a.mamba.taps - 1) * (values + 2 * vectors) + values * a.mamba.state
    elif a.convolution is not None:
        least, floats = 8, (a.convolution.taps - 1) * a.hidden
    floats *= sum(mixer not in ("attention", "nothing") for mixer in a.mixers)
    request, last = cache.open(400), torch.tensor([99])

    def held() -> int:
        kept = cache.states(request)
        assert kept is not None and kept.memory.nbytes % (4 * floats) == 0
        return kept.memory.nbytes // (4 * floats)

    assert held() == least
    feed(decoder, cache, request, text(100), last)
    feed(decoder, cache, request, text(70))  # scored
    feed(decoder, cache, request, text(1))
    assert held() == least
    # A prompt's last piece, with a draft behind it; and then a longer draft, and a shorter one.
    feed(decoder, cache, request, text(100), torch.arange(90, 100))
    assert held() == 10
    feed(decoder, cache, request, text(12))
    feed(decoder, cache, request, text(3))
    assert held() == 12
    if isinstance(decoder, NativeDecoder):
        decoder.continue_greedy(text(9), Rows.chains([(request, 286, 9)]), cache, [14], decoder.vocab_size)
        assert held() == 14
    # Keys and values of the layers with attention.
    layers = sum("attention" in mixer for mixer in a.mixers)
    assert cache.bytes_per_token() == layers * 2 * 4 * a.kv_heads * a.head_dim


def test_drafts_that_are_fed_token_by_token(decoder: BaseDecoder) -> None:
    """Nothing tells them from text: once they are rolled back, their states are kept, and no others' are."""
    cache = decoder.new_cache()
    request = cache.open(140)
    feed(decoder, cache, request, text(40), torch.tensor([39]))
    kept = cache.states(request)
    assert kept is not None
    first, known = len(kept.memory), text(40)
    grown = max(10, 2 * first)
    for fed, back, held in ((1, 1, first), (first + 1, first + 1, 2 * first), (9, 9, grown), (90, 89, grown)):
        drafted = text(fed, seed=fed)
        for token in drafted:
            feed(decoder, cache, request, token.view(1))
        cache.truncate(request, len(known) + fed - back)
        known = torch.cat((known, drafted[: fed - back], text(1, seed=7)))
        assert torch.equal(feed(decoder, cache, request, known[-1:]), run(decoder, known, 64)[-1:]), fed
        assert len(kept.memory) == held


def test_a_prompt_with_a_tree_behind_it(decoder: BaseDecoder) -> None:
    """The tree's states are kept, and of the prompt the last alone; also where the tree begins as a chain."""
    tokens = text(49, seed=3)
    for parents, path in (([0, 0, 1, 1, 2, 4], [0, 1, 4, 6]), ([0, 1, 2, 2, 0, 5], [0, 1, 2, 4])):
        cache = decoder.new_cache()
        request = cache.open(80)
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        above = [-1, *range(42), *(42 + parent for parent in parents)]
        positions = torch.tensor([*range(42), *(42 + depth for depth in depths)])
        rows = Rows(torch.full((49,), request), positions, torch.tensor(above))
        tree = decoder.forward(tokens, rows, cache, torch.arange(42, 49)).logits
        kept = cache.states(request)
        assert kept is not None and len(kept.memory) <= 8
        chain = torch.cat((tokens[:42], tokens[42:][path]))
        assert torch.equal(tree[path], run(decoder, chain, 64)[42:])
        cache.keep(request, 43, [node - 1 for node in path[1:3]])
        chain = torch.cat((chain[:45], tokens[:2]))
        assert torch.equal(feed(decoder, cache, request, tokens[:2]), run(decoder, chain, 64)[-2:])


def test_long_drafts_do_not_make_it_read_the_text_again_each_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens one is taken each time: the states reach back to it, and a text of more is read again."""
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    restarts, restart = [], States.restart

    def counted(states: States) -> None:
        restarts.append(len(states.tokens))
        restart(states)

    monkeypatch.setattr(States, "restart", counted)
    cache, tokens = decoder.new_cache(), text(64)
    request = cache.open(100)
    for length in range(1, 20):
        feed(decoder, cache, request, tokens)
        cache.truncate(request, length)
    assert not restarts
    feed(decoder, cache, request, text(66))
    cache.truncate(request, 20)
    feed(decoder, cache, request, tokens[:1])
    assert restarts == [20]
    cache.truncate(request, 19)
    want = run(decoder, torch.cat((tokens[:1].repeat(19), tokens[:3])), 64)[-3:]
    assert torch.equal(feed(decoder, cache, request, tokens[:3]), want)


def test_a_cache_of_a_model_without_states_is_refused(path: Path) -> None:
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    cache = ContiguousCache(replace(decoder.new_cache().format, state=0))
    request = cache.open(10)
    with pytest.raises(ValueError, match="another model's"):
        feed(decoder, cache, request, text(3))


def test_put_back_for_want_of_pages(path: Path, tmp_path: Path) -> None:
    """Requests that lose their pages, and their states with them, begin again from their texts and lose nothing."""
    target, draft = load(path, threads=1), load(pack(path, tmp_path, "int4")[0], threads=1)
    prompts = [text(50, seed).tolist() for seed in range(4)]
    plain = Speculator(target, cache=CacheOptions("int8")).generate(prompts, 60, stop=())
    tight = Speculator(target, ModelDrafter(draft), draft_length=4, cache=CacheOptions("int8", 5))
    found = tight.generate(prompts, 60, stop=())
    assert sum(one.metrics.preemptions for one in found) > 0
    assert [one.tokens for one in found] == [one.tokens for one in plain]


def rejected_drafts(path: Path, out: Path, temperature: float, options: CacheOptions, lengths: Sequence[int]) -> None:
    """Texts of these lengths, in order: by a draft that is often wrong they are what plain decoding gives."""
    target, draft = load(path, threads=2), load(pack(path, out, "int4")[0], threads=2)
    prompts, sampling = [text(9, seed).tolist() for seed in (4, 5)], Sampling(temperature=temperature, seed=11)
    rates = []

    def texts(drafter: object, length: int) -> list[list[int]]:
        made = Speculator(target, drafter, draft_length=5, cache=options)  # type: ignore[arg-type]
        found = made.generate(prompts, length, sampling)
        rates.append(found[0].metrics.acceptance_rate)
        return [list(one.tokens) for one in found]

    plain = texts(None, lengths[-1])
    for length in lengths:
        assert texts(ModelDrafter(draft), length) == [one[:length] for one in plain], length
    # Some drafts were taken, and some were not.
    assert rates[-1] is not None and 0 < rates[-1] < 1


CACHED = pytest.mark.parametrize(
    "options", [CacheOptions("float32"), CacheOptions("int4", 16)], ids=["float32", "int4-pages"]
)


@CACHED
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rejected_drafts(path: Path, tmp_path: Path, temperature: float, options: CacheOptions) -> None:
    rejected_drafts(path, tmp_path, temperature, options, (1, 2, 17, 80))


@pytest.mark.slow
@CACHED
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rejected_drafts_at_every_length(path: Path, tmp_path: Path, temperature: float, options: CacheOptions) -> None:
    rejected_drafts(path, tmp_path, temperature, options, range(1, 301))
