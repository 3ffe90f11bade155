"""States in float16 and int8: near float32 in less memory, and the same bits at every width and rolled back."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime import Speculator, load
from runtime.cache.contiguous import KeyValueCache
from runtime.contract import Rows, StateKind
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.runtime.model.test_families import relative, text

KINDS = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")
HELD: tuple[StateKind, ...] = ("float16", "int8")
HALF, BYTES = (CacheOptions(states=states) for states in HELD)
held_in = pytest.mark.parametrize("states", HELD)


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


@held_in
def test_the_same_bits_at_every_width(decoder: BaseDecoder, states: StateKind) -> None:
    """And other ones than those of float32, which they are near to; in int8 a convolution's inputs are as they were."""
    tokens, alike = text(70), states == "int8" and decoder.architecture.convolution is not None
    want = whole(decoder, tokens, CacheOptions(states=states))
    error = relative(want, whole(decoder, tokens, CacheOptions()))
    # A row of a mixture may go to other experts.
    bound = 0.02 if states == "float16" else 0.2 if decoder.architecture.experts is not None else 0.05
    assert error == 0 if alike else 0 < error < bound
    for width in (1, 3, 16):
        cache = decoder.new_cache("float32", 4, states)
        request = cache.open(70)
        found = [feed(decoder, cache, request, tokens[at : at + width]) for at in range(0, 70, width)]
        assert torch.equal(torch.cat(found), want), width
    kept = cache.states(request)
    assert kept is not None and kept.memory.dtype is getattr(torch, states)


@held_in
def test_the_reference_has_the_same_bits(path: Path, decoder: BaseDecoder, states: StateKind) -> None:
    reference = load(path, kernels="reference").decoder
    assert isinstance(reference, BaseDecoder) and decoder.kernels != "reference"
    tokens, options = text(5), CacheOptions(states=states)
    assert torch.equal(whole(reference, tokens, options), whole(decoder, tokens, options))


@held_in
def test_rolled_back_and_in_trees(decoder: BaseDecoder, states: StateKind) -> None:
    tokens, other, options = text(60), text(8, seed=3), CacheOptions(states=states)
    for length in (59, 55, 30, 0):
        cache = decoder.new_cache("float32", None, states)
        request = cache.open(80)
        feed(decoder, cache, request, tokens)
        cache.truncate(request, length)
        found = feed(decoder, cache, request, other)
        assert torch.equal(found, whole(decoder, torch.cat((tokens[:length], other)), options)[length:]), length
    parents, depths = [-1, 0, 0, 1, -1, 4], [0, 1, 1, 2, 0, 1]
    cache = decoder.new_cache("float32", None, states)
    request = cache.open(80)
    feed(decoder, cache, request, tokens[:40])
    rows = Rows(torch.full((6,), request), torch.tensor(depths) + 40, torch.tensor(parents))
    tree = decoder.forward(other[:6], rows, cache).logits
    for branch in ([0, 1, 3], [0, 2], [4, 5]):
        chain = torch.cat((tokens[:40], other[branch]))
        assert torch.equal(tree[branch], whole(decoder, chain, options)[40:])
    cache.keep(request, 40, [0, 2])
    chain = torch.cat((tokens[:40], other[[0, 2]], tokens[:3]))
    assert torch.equal(feed(decoder, cache, request, tokens[:3]), whole(decoder, chain, options)[-3:])


@pytest.mark.parametrize(("temperature", "states"), [(0.0, "float16"), (0.8, "float16"), (0.8, "int8")])
def test_speculation_is_plain_decoding(path: Path, tmp_path: Path, temperature: float, states: StateKind) -> None:
    target, draft = load(path, threads=1), load(pack(path, tmp_path, "int4")[0], threads=1)
    prompts, sampling = [text(9, seed).tolist() for seed in (4, 5)], Sampling(temperature=temperature, seed=2)
    plain = Speculator(target, cache=CacheOptions(states=states)).generate(prompts, 30, sampling, stop=())
    options = CacheOptions("int8" if "mamba2" in path.name else "float32", 8, states)
    found = Speculator(target, ModelDrafter(draft), draft_length=4, cache=options).generate(
        prompts, 30, sampling, stop=()
    )
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    rate = found[0].metrics.acceptance_rate
    assert rate is not None and rate > 0


def test_less_memory(decoder: BaseDecoder) -> None:
    sizes = []
    for options in (CacheOptions(), HALF, BYTES):
        cache = options.make(decoder)
        assert isinstance(cache, KeyValueCache)
        request = cache.open(9)
        feed(decoder, cache, request, text(9))
        kept = cache.states(request)
        assert kept is not None
        sizes.append(kept.memory.nbytes)
        assert len(kept.copy().memory) == len(kept.memory) and kept.copy().memory.dtype is kept.memory.dtype
    assert sizes[0] == 2 * sizes[1]
    shapes = decoder.architecture.state_shapes
    inputs, rows = sum(shape.inputs for shape in shapes), sum(shape.rows for shape in shapes)
    codes = sum(shape.rows * shape.columns for shape in shapes)
    of_each = sizes[2] // len(kept.memory)
    assert 4 * (inputs + rows) + codes <= of_each < 4 * (inputs + rows) + codes + 4 * len(shapes)
    assert sizes[2] < sizes[0] or not rows


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
    with pytest.raises(UserError, match="one of float32, float16, int8, but it is 'int4'"):
        CacheOptions(states="int4")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="need our own kernels"):
        load(tiny("gpt2")).decoder.new_cache("float32", None, "float16")
