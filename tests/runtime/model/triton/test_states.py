"""Layers that carry a state, on Triton's kernels: rolled back, in trees and batches, drafted and replayed by graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Speculator, load
from runtime.cache import states
from runtime.contract import CacheKind, Rows, integers
from runtime.errors import UserError
from runtime.kernels.triton.row_states import CARRIED
from runtime.model.triton.batch import Inputs, Shape
from runtime.model.triton.cache import GpuCache
from runtime.model.triton.decoder import TritonDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.model import ModelDrafter
from tests.runtime.model.families import pack, write
from tests.slices import often

# A tree whose rows read what rows before the last one have left, and a second root.
PARENTS, DEPTHS = [-1, 0, 0, -1], [0, 1, 1, 0]
VOCABULARY = 311
# The interpreter takes a tenth of a second for a row of a layer.
_FEW: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 2}
FEWER: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **{"head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "mlp_only_layers": [0, 1]},
    },
    "falcon_h1": {
        **{"head_dim": 8, "num_hidden_layers": 1, "mamba_d_ssm": 24, "mamba_n_heads": 2, "mamba_n_groups": 1},
    },
    "mamba2": {
        **{"hidden_size": 12, "num_heads": 3, "head_dim": 8, "n_groups": 1},
        **{"num_attention_heads": None, "intermediate_size": None},
    },
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 2, "n_groups": 1},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12},
    },
}
KINDS = list(FEWER)
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in known:
            known[kind] = write(kind, tmp_path_factory.mktemp(kind) / kind, **_FEW | FEWER[kind])
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


@pytest.mark.parametrize("kind", often(KINDS, "qwen3_next"))
def test_states_in_float16(made: Made, kind: str, device: str) -> None:
    """Near those of the CPU's kernels, the same bits at other widths and rolled back; and not those of float32."""
    here, tokens = decoder(made(kind), device), words(7)
    cache = here.new_cache("float32", None, "float16")
    request = cache.open(16)
    want = feed(here, cache, request, tokens)
    native = load(made(kind), threads=1).decoder
    other = native.new_cache("float32", None, "float16")
    found = native.forward(tokens, Rows.chains([(other.open(7), 0, 7)]), other).logits
    assert (want.cpu() - found).norm() < 1e-3 * found.norm()
    assert not torch.equal(want, whole(here, tokens))
    cache.truncate(request, 5)
    assert torch.equal(feed(here, cache, request, tokens[5:]), want[5:])
    again = cache.open(16)
    pieces = [feed(here, cache, again, tokens[at : at + 2]) for at in range(0, 7, 2)]
    assert torch.equal(torch.cat(pieces), want)
    chain = cache.open(16)
    drafted = here.continue_greedy(tokens[:4], Rows.chains([(chain, 0, 4)]), cache, [3], VOCABULARY)[0].cpu()
    cache.truncate(chain, 0)
    logits = feed(here, cache, chain, torch.cat((tokens[:4], drafted)))
    assert torch.equal(logits[3:6].argmax(1).cpu(), drafted)


@pytest.mark.parametrize("kind", often(KINDS, "falcon_h1"))
@pytest.mark.parametrize("held", often(["float32", "int8", "int4"], "int4"))
def test_trees_in_a_batch_are_their_chains(made: Made, device: str, kind: str, held: CacheKind) -> None:
    """Kept or rolled back, also further than states are held, texts go on as if the rest had never been."""
    own = decoder(made(kind), device)
    cache, before, tree, other = own.new_cache(held), words(2), words(len(PARENTS), 3), words(2, 4)
    first, second = cache.open(40), cache.open(40)
    feed(own, cache, first, before)
    requests, positions = [first] * len(tree) + [second] * 2, [*(2 + depth for depth in DEPTHS), 0, 1]
    rows = Rows(integers(requests), integers(positions), integers([*PARENTS, -1, len(tree)]))
    found = own.forward(torch.cat((tree, other)), rows, cache).logits
    for path in ([0, 2], [3]):
        assert torch.equal(found[path], whole(own, torch.cat((before, tree[path])), held)[2:]), path
    assert torch.equal(found[len(tree) :], whole(own, other, held))
    cache.keep(first, 2, [0, 2])
    chain = torch.cat((before, tree[[0, 2]], other))
    assert torch.equal(feed(own, cache, first, other), whole(own, chain, held)[-2:])
    for length in (5, 1):
        cache.truncate(first, length)
        again = torch.cat((chain[:length], tree[1:2]))
        assert torch.equal(feed(own, cache, first, tree[1:2]), whole(own, again, held)[-1:]), length


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
    want = whole(own, torch.cat((text[:6], tokens[:1])))[-1:]
    # The same rows, verified with the draft's tokens as they lie on the device.
    placeholders = torch.cat((tokens, torch.zeros(4, dtype=torch.int64)))
    rows = Rows.chains([(twin, 0, 7)])
    own.forward_drafted(placeholders, rows, cache, integers([2, 3, 4, 5, 6]), drafted[:4], [3, 4, 5, 6])
    for handle in (request, twin):
        kept = cache.states(handle)
        assert kept is not None and cache.length(handle) == 7
        monkeypatch.setattr(kept, "_oldest", 7)
        cache.truncate(handle, 6)
        assert not kept.holds(6)
        assert torch.equal(feed(own, cache, handle, tokens[:1]), want)


@pytest.mark.parametrize("kind", often(KINDS, "lfm2"))
@pytest.mark.parametrize("temperature", often([0.0, 0.9], 0.9))
def test_rejected_drafts(made: Made, tmp_path: Path, device: str, kind: str, temperature: float) -> None:
    """Some drafts are taken and some are not; the text is that of plain decoding."""
    target = load(made(kind), device=device, kernels="triton")
    draft = load(pack(made(kind), tmp_path, "int4")[0], device=device, kernels="triton")
    # Texts that the draft gets wrong somewhere: random models often write one token again and again.
    prompt = words(3, seed=1 if temperature == 0.0 or kind == "mamba2" else 4).tolist()
    prompts, sampling = [prompt], Sampling(temperature=temperature, seed=11)
    found = []
    for drafter in (None, ModelDrafter(draft)):
        speculator = Speculator(target, drafter, draft_length=3, cache=CacheOptions("int8", 8))
        found.append(speculator.generate(prompts, 6, sampling, stop=())[0])
    assert found[0].tokens == found[1].tokens
    rate = found[1].metrics.acceptance_rate
    assert rate is not None and 0 < rate < 1


# All but the one whose experts the host sends rows to.
@pytest.mark.parametrize("kind", often(KINDS[:-1], "mamba2"))
def test_a_forward_reads_nothing_but_its_block(
    made: Made, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would replay: a shape's first forward and round, with the inputs of later ones, whose
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
    assert run() == want and want[:2] != want[2:]
    assert len(first) == 4


def test_states_in_int8_are_refused(made: Made, device: str) -> None:
    with pytest.raises(UserError, match="states in int8 are for CPUs; on a GPU take float16"):
        decoder(made("lfm2"), device).new_cache("float32", None, "int8")


def test_where_states_lie(made: Made, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts leave the states that are held; what no request has begins with zeros and leaves nothing."""
    monkeypatch.setattr(states, "_LARGE", 0)
    own = decoder(made("lfm2"), device)
    cache = own.new_cache()
    request = cache.open(60)
    given: list[Inputs] = []

    def hidden(cache: GpuCache, blocks: int, inputs: Inputs, *rest: object) -> tuple[Tensor, None]:
        given.append(inputs)
        return torch.zeros((len(inputs.token), own.hidden_size), device=own.device), None

    monkeypatch.setattr(own, "_hidden", hidden)
    rows = Rows.chains([(request, 0, 7)])
    own.forward(words(7), rows, cache, integers([4, 5, 6]))
    kept = cache.states(request)
    assert kept is not None
    address, held, floats, _ = kept.pointers
    walk = given[0].walk
    assert held == 3 and walk.spans[:3].tolist() == [[0, 7], [7, 1], [0, 0]]
    assert walk.addresses[:, 0].tolist() == [0, *[CARRIED] * 6, 0]
    assert walk.addresses[:, 1].tolist() == [0] * 4 + [address + 4 * floats * place for place in (1, 2, 0)] + [0]
