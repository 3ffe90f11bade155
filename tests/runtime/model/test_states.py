"""Layers that carry a state: rolled back any distance, in chains and trees, texts go on as if it had never been."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.cache.contiguous import ContiguousCache, KeyValueCache
from runtime.cache.states import States
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.model.native import NativeDecoder
from runtime.model.reference import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.runtime.model.test_families import run, text

KINDS = ("lfm2",)


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


# The reference decoder's share takes most of a minute; test_families.py has its short texts in every run.
@pytest.fixture(scope="module", params=["auto", pytest.param("reference", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest, path: Path) -> BaseDecoder:
    found = load(path, threads=1, kernels=request.param).decoder
    assert isinstance(found, BaseDecoder)
    return found


def feed(decoder: BaseDecoder, cache: KeyValueCache, request: int, tokens: Tensor) -> Tensor:
    rows = Rows.chains([(request, cache.length(request), len(tokens))])
    return decoder.forward(tokens, rows, cache).logits


@pytest.mark.parametrize("pages", [None, 4])
def test_rolled_back_to_any_length(decoder: BaseDecoder, pages: int | None) -> None:
    """Within the states that are kept, and far beyond them."""
    tokens, other = text(100), text(20, seed=3)
    for length in (99, 97, 93, 80, 61, 1, 0):
        cache = decoder.new_cache("float32", pages)
        request = cache.open(140)
        feed(decoder, cache, request, tokens)
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
    """As many floats as the record says, for as many tokens as were held at most."""
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache()
    request = cache.open(200)
    feed(decoder, cache, request, text(3))
    states = cache.states(request)
    assert states is not None
    # lfm2: three inputs of 200 channels in each of two layers.
    assert sum(decoder.architecture.state_sizes) == 2 * 3 * 200
    assert states.memory.nbytes == 8 * 4 * 2 * 3 * 200
    feed(decoder, cache, request, text(100))
    assert states.memory.nbytes == 32 * 4 * 2 * 3 * 200
    # Keys and values of the one layer with attention.
    assert cache.bytes_per_token() == 2 * 4 * decoder.architecture.kv_heads * decoder.architecture.head_dim


def test_long_drafts_do_not_make_it_read_the_text_again_each_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens one is taken each time: once the states do not reach back, then they do."""
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
    assert restarts == [1]
    want = run(decoder, torch.cat((tokens[:1].repeat(19), tokens[:3])), 64)[-3:]
    assert torch.equal(feed(decoder, cache, request, tokens[:3]), want)


def test_a_cache_of_a_model_without_states_is_refused(path: Path) -> None:
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    cache = ContiguousCache(replace(decoder.new_cache().format, state=0))
    request = cache.open(10)
    with pytest.raises(ValueError, match="another model's"):
        feed(decoder, cache, request, text(3))


def test_triton_refuses_it_in_one_sentence(path: Path) -> None:
    triton = pytest.importorskip("runtime.model.triton.decoder")
    decoder = load(path, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    with pytest.raises(UserError, match="layers with a state, which the kernels in Triton have not"):
        triton.TritonDecoder(decoder.architecture, None, decoder.parts, decoder.kernel)


def test_put_back_for_want_of_pages(path: Path, tmp_path: Path) -> None:
    """Requests that lose their pages, and their states with them, begin again from their texts and lose nothing."""
    target, draft = load(path, threads=1), load(pack(path, tmp_path, "int4")[0], threads=1)
    prompts = [text(50, seed).tolist() for seed in range(4)]
    plain = Speculator(target, cache=CacheOptions("int8")).generate(prompts, 60, stop=())
    tight = Speculator(target, ModelDrafter(draft), draft_length=4, cache=CacheOptions("int8", 5))
    found = tight.generate(prompts, 60, stop=())
    assert sum(one.metrics.preemptions for one in found) > 0
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [CacheOptions("float32"), CacheOptions("int4", 16)], ids=["float32", "int4-pages"])
def test_rejected_drafts_at_every_length(path: Path, tmp_path: Path, temperature: float, options: CacheOptions) -> None:
    """Texts of 300 tokens, cut at each length: by a draft that is often wrong they are what plain decoding gives."""
    target, draft = load(path, threads=2), load(pack(path, tmp_path, "int4")[0], threads=2)
    prompts, sampling = [text(9, seed).tolist() for seed in (4, 5)], Sampling(temperature=temperature, seed=11)
    rates = []

    def texts(drafter: object, length: int) -> list[list[int]]:
        made = Speculator(target, drafter, draft_length=5, cache=options)  # type: ignore[arg-type]
        found = made.generate(prompts, length, sampling)
        rates.append(found[0].metrics.acceptance_rate)
        return [list(one.tokens) for one in found]

    plain = texts(None, 300)
    for length in range(1, 301):
        assert texts(ModelDrafter(draft), length) == [one[:length] for one in plain], length
    # Some drafts were taken, and some were not.
    assert rates[-1] is not None and 0 < rates[-1] < 1
