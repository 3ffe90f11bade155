"""Layers that carry a state, on Triton's kernels: rolled back, in trees and batches, drafted and replayed by graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.cache import states
from runtime.contract import CacheKind, Rows, integers
from runtime.kernels.triton.row_states import CARRIED
from runtime.model.triton.batch import Inputs, Shape
from runtime.model.triton.cache import GpuCache
from runtime.model.triton.decoder import TritonDecoder
from runtime.model.triton.draft_steps import Chains, fill_round, round_for, steps_of
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.slices import often

# A tree whose rows read what rows before the last one have left, and a second root.
PARENTS = [-1, 0, 0, 1, -1, 3]
DEPTHS = [0, 1, 1, 2, 0, 3]
VOCABULARY = 311
KINDS = ["lfm2", "qwen3_next", "falcon_h1", "mamba2", "nemotron_h"]
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in known:
            known[kind] = write(kind, tmp_path_factory.mktemp(kind) / kind, vocab_size=VOCABULARY)
        return known[kind]

    return get


def decoder(path: Path, device: str) -> TritonDecoder:
    found = load(path, device=device, kernels="triton").decoder
    assert isinstance(found, TritonDecoder)
    return found


def words(count: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def feed(made: TritonDecoder, cache: GpuCache, request: int, tokens: Tensor) -> Tensor:
    return made.forward(tokens, Rows.chains([(request, cache.length(request), len(tokens))]), cache).logits


def whole(made: TritonDecoder, tokens: Tensor, kind: CacheKind = "float32") -> Tensor:
    cache = made.new_cache(kind)
    return feed(made, cache, cache.open(len(tokens)), tokens)


@pytest.mark.parametrize("kind", often(KINDS, "falcon_h1"))
@pytest.mark.parametrize("held", often(["float32", "int8", "int4"], "int4"))
def test_trees_in_a_batch_are_their_chains(made: Made, device: str, kind: str, held: CacheKind) -> None:
    """Kept or rolled back, also further than states are held, texts go on as if the rest had never been."""
    own = decoder(made(kind), device)
    cache, tree, other = own.new_cache(held), words(len(PARENTS), 3), words(4, 4)
    first, second = cache.open(40), cache.open(40)
    before = words(5)
    feed(own, cache, first, before)
    positions = [*(len(before) + depth for depth in DEPTHS), *range(4)]
    rows = Rows(
        integers([first] * len(tree) + [second] * 4), integers(positions), integers([*PARENTS, -1, 6, 7, 8])
    )  # fmt: skip
    found = own.forward(torch.cat((tree, other)), rows, cache).logits
    for path in ([0, 1, 3, 5], [0, 2], [4]):
        chain = torch.cat((before, tree[path]))
        assert torch.equal(found[path], whole(own, chain, held)[len(before) :]), path
    assert torch.equal(found[len(tree) :], whole(own, other, held))
    cache.keep(first, len(before), [0, 1, 3])
    chain = torch.cat((before, tree[[0, 1, 3]], other[:2]))
    assert torch.equal(feed(own, cache, first, other[:2]), whole(own, chain, held)[-2:])
    for length in (9, 1, 0):
        cache.truncate(first, length)
        again = torch.cat((chain[:length], other[1:3]))
        assert torch.equal(feed(own, cache, first, other[1:3]), whole(own, again, held)[-2:]), length


@pytest.mark.parametrize("kind", often(KINDS, "lfm2"))
def test_what_was_drafted_on_the_device_is_known(
    made: Made, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's tokens are read from the device when its text is computed again, from the first token on."""
    own = decoder(made(kind), device)
    cache, tokens = own.new_cache(), words(3)
    request, twin = cache.open(60), cache.open(60)
    drafted = own.draft(tokens, Rows.chains([(request, 0, 3)]), cache, [5], own.vocab_size)[0]
    text = torch.cat((tokens, drafted.cpu()))
    assert torch.equal(whole(own, text).argmax(1)[2:-1].cpu(), text[3:])
    # The same rows, verified with the draft's tokens as they lie on the device.
    placeholders = torch.cat((tokens, torch.zeros(4, dtype=torch.int64)))
    rows = Rows.chains([(twin, 0, 7)])
    own.forward_drafted(placeholders, rows, cache, integers([2, 3, 4, 5, 6]), drafted[:4], [3, 4, 5, 6])
    for handle in (request, twin):
        kept = cache.states(handle)
        assert kept is not None and cache.length(handle) == 7
        for length in (6, 5):
            monkeypatch.setattr(kept, "_oldest", len(kept.tokens))
            cache.truncate(handle, length)
            want = whole(own, torch.cat((text[:length], tokens[:1])))[-1:]
            assert torch.equal(feed(own, cache, handle, tokens[:1]), want)
            cache.truncate(handle, length)


@pytest.mark.parametrize("kind", often(KINDS, "qwen3_next"))
@pytest.mark.parametrize("temperature", often([0.0, 0.9], 0.9))
def test_rejected_drafts(made: Made, tmp_path: Path, device: str, kind: str, temperature: float) -> None:
    """Some drafts are taken and some are not; the text is that of plain decoding."""
    target = load(made(kind), device=device, kernels="triton")
    draft = load(pack(made(kind), tmp_path, "int4")[0], device=device, kernels="triton")
    prompts, sampling = [words(4, seed).tolist() for seed in (4, 5)], Sampling(temperature=temperature, seed=11)
    found = []
    for drafter in (None, ModelDrafter(draft)):
        speculator = Speculator(target, drafter, draft_length=3, cache=CacheOptions("int8", 8))
        found.append(speculator.generate(prompts, 12, sampling, stop=()))
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
    rate = found[1][0].metrics.acceptance_rate
    assert rate is not None and 0 < rate < 1


@pytest.mark.parametrize("kind", often(KINDS, "mamba2"))
def test_a_forward_reads_nothing_but_its_block(
    made: Made, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would replay: the launches of a shape's first forward and round, with the inputs of later ones, whose
    states lie elsewhere."""
    own = decoder(made(kind), device)

    def run() -> list[list[list[float]]]:
        cache, found = own.new_cache(), []
        for seed in (1, 2):
            request = cache.open(60)
            feed(own, cache, request, words(2 + seed, seed))
            found.append(feed(own, cache, request, words(2, 5 + seed)).tolist())
            rows = Rows.chains([(request, cache.length(request), 1)])
            found.append(own.draft(words(1, seed), rows, cache, [3], own.vocab_size).tolist())
        return found

    want = run()
    first: dict[Shape, Callable[[], object]] = {}

    def replay(pool: object, shape: Shape, forward: Callable[[], object]) -> object:
        return first.setdefault(shape, forward)()

    monkeypatch.setattr(own._graphs, "_memory", None)
    monkeypatch.setattr(own._graphs, "run", replay)
    if own.architecture.experts is None:
        assert run() == want and want[:2] != want[2:] and len(first) < 6


def test_where_states_lie(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts leave the states that are held; what no request has begins with zeros and leaves nothing."""
    monkeypatch.setattr(states, "_LARGE", 0)
    own = decoder(made("lfm2"), "cpu" if not torch.cuda.is_available() else "cuda")
    cache = own.new_cache()
    request = cache.open(60)
    shapes: list[Inputs] = []
    monkeypatch.setattr(own, "_hidden", lambda cache, blocks, inputs, *rest: shapes.append(inputs) or torch.zeros(8, 200))
    with pytest.raises(Exception):
        feed(own, cache, request, words(7))
    kept = cache.states(request)
    assert kept is not None
    address, held, floats = kept.pointers
    walk = shapes[0].walk
    assert held == 7 and walk.spans[:3].tolist() == [[0, 7], [7, 1], [0, 0]]
    assert walk.addresses[:, 0].tolist() == [0, *[CARRIED] * 6, 0]
    assert walk.addresses[:, 1].tolist() == [*(address + 4 * floats * slot for slot in range(7)), 0]
