"""States in float16: near float32 at half the memory, and the same bits at every width and rolled back."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime import Speculator, load
from runtime.cache.contiguous import KeyValueCache
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.runtime.model.test_families import relative, text

KINDS = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")
HALF = CacheOptions(states="float16")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Convolutions, a delta rule, a state space beside attention, and state spaces alone."""
    yield write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def decoder(path: Path) -> BaseDecoder:
    found = load(path, threads=2).decoder
    assert isinstance(found, BaseDecoder)
    return found


def feed(decoder: BaseDecoder, cache: KeyValueCache, request: int, tokens: torch.Tensor) -> torch.Tensor:
    return decoder.forward(tokens, Rows.chains([(request, cache.length(request), len(tokens))]), cache).logits


def whole(decoder: BaseDecoder, tokens: torch.Tensor, options: CacheOptions = HALF) -> torch.Tensor:
    cache = options.make(decoder)
    assert isinstance(cache, KeyValueCache)
    return feed(decoder, cache, cache.open(len(tokens)), tokens)


def test_the_same_bits_at_every_width(decoder: BaseDecoder) -> None:
    """And other ones than those of float32, which they are near to."""
    tokens = text(70)
    want = whole(decoder, tokens)
    assert 0 < relative(want, whole(decoder, tokens, CacheOptions())) < 0.02
    for width in (1, 3, 16):
        cache = decoder.new_cache("float32", 4, "float16")
        request = cache.open(70)
        found = [feed(decoder, cache, request, tokens[at : at + width]) for at in range(0, 70, width)]
        assert torch.equal(torch.cat(found), want), width
    kept = cache.states(request)
    assert kept is not None and kept.memory.dtype is torch.float16


def test_the_reference_has_the_same_bits(path: Path, decoder: BaseDecoder) -> None:
    reference = load(path, kernels="reference").decoder
    assert isinstance(reference, BaseDecoder) and decoder.kernels != "reference"
    tokens = text(5)
    assert torch.equal(whole(reference, tokens), whole(decoder, tokens))


def test_rolled_back_and_in_trees(decoder: BaseDecoder) -> None:
    tokens, other = text(60), text(8, seed=3)
    for length in (59, 55, 30, 0):
        cache = decoder.new_cache("float32", None, "float16")
        request = cache.open(80)
        feed(decoder, cache, request, tokens)
        cache.truncate(request, length)
        found = feed(decoder, cache, request, other)
        assert torch.equal(found, whole(decoder, torch.cat((tokens[:length], other)))[length:]), length
    parents, depths = [-1, 0, 0, 1, -1, 4], [0, 1, 1, 2, 0, 1]
    cache = decoder.new_cache("float32", None, "float16")
    request = cache.open(80)
    feed(decoder, cache, request, tokens[:40])
    rows = Rows(torch.full((6,), request), torch.tensor(depths) + 40, torch.tensor(parents))
    tree = decoder.forward(other[:6], rows, cache).logits
    for branch in ([0, 1, 3], [0, 2], [4, 5]):
        chain = torch.cat((tokens[:40], other[branch]))
        assert torch.equal(tree[branch], whole(decoder, chain)[40:])
    cache.keep(request, 40, [0, 2])
    chain = torch.cat((tokens[:40], other[[0, 2]], tokens[:3]))
    assert torch.equal(feed(decoder, cache, request, tokens[:3]), whole(decoder, chain)[-3:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_is_plain_decoding(path: Path, tmp_path: Path, temperature: float) -> None:
    target, draft = load(path, threads=1), load(pack(path, tmp_path, "int4")[0], threads=1)
    prompts, sampling = [text(9, seed).tolist() for seed in (4, 5)], Sampling(temperature=temperature, seed=2)
    plain = Speculator(target, cache=HALF).generate(prompts, 30, sampling, stop=())
    options = CacheOptions("int8" if "mamba2" in path.name else "float32", 8, "float16")
    found = Speculator(target, ModelDrafter(draft), draft_length=4, cache=options).generate(
        prompts, 30, sampling, stop=()
    )
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    rate = found[0].metrics.acceptance_rate
    assert rate is not None and rate > 0


def test_half_the_memory(decoder: BaseDecoder) -> None:
    sizes = []
    for options in (CacheOptions(), HALF):
        cache = options.make(decoder)
        assert isinstance(cache, KeyValueCache)
        request = cache.open(9)
        feed(decoder, cache, request, text(9))
        kept = cache.states(request)
        assert kept is not None
        sizes.append(kept.memory.nbytes)
        assert len(kept.copy().memory) == len(kept.memory) and kept.copy().memory.dtype is kept.memory.dtype
    assert sizes[0] == 2 * sizes[1]


def test_a_state_beyond_the_range_is_no_number(decoder: BaseDecoder) -> None:
    """It is an infinity, which logits show, so that a text ends with an error rather than with nonsense."""
    cache = decoder.new_cache("float32", None, "float16")
    request = cache.open(9)
    feed(decoder, cache, request, text(4))
    kept = cache.states(request)
    assert kept is not None
    kept.memory.fill_(float("inf"))
    assert not torch.isfinite(feed(decoder, cache, request, text(2))).all()


def test_refusals(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    plain = load(write("olmo2", tmp_path / "olmo2"), threads=1)
    with pytest.raises(UserError, match="no layer of this model carries a state"):
        Speculator(plain, cache=HALF)
    with pytest.raises(UserError, match="one of float32, float16, but it is 'int8'"):
        CacheOptions(states="int8")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="need our own kernels"):
        load(tiny("gpt2")).decoder.new_cache("float32", None, "float16")
