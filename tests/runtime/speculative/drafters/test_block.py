"""The block drafter: its files, its network as it was trained, trees that change no text, states that are missing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from compress.block_draft.network import BlockNetwork as Trained
from compress.block_draft.network import Blocks
from runtime import Model, Speculator, load
from runtime.checkpoints.block_draft import DESCRIPTION, WEIGHTS, Description, read_description, read_weights
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Draft, Request, TakenStates
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import BlockNetwork, Seen, load_network, tables
from runtime.speculative.drafters.by_name import drafter_by_name
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.verify import require_sound
from tests.conftest import write_block

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
PROMPTS = ["def f(x):", "import os", "a", "class Tree:\n    def"]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1.2, top_k=5, seed=4, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def target(tiny_packed: TinyPacked, kernels: str) -> Model:
    return load(tiny_packed("int8"), kernels=kernels)


@pytest.fixture
def folder(target: Model, tmp_path: Path) -> Path:
    return write_block(target.path, tmp_path / "block")


# Files.


def test_a_description_is_read_as_it_was_written(folder: Path) -> None:
    about = read_description(folder)
    assert about.taps == (1, 2) and about.shapes()["layers.1.down"] == (64, about.intermediate_size)
    assert {name: tuple(one.shape) for name, one in read_weights(folder, about).items()} == about.shapes()
    (folder / DESCRIPTION).write_text(about.to_json())
    assert read_description(folder) == about


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version must be 1, found 2"),
        ({"window": None}, "the key window is missing"),
        ({"colour": 1}, "the key colour is unknown"),
        ({"length": "3"}, "length must be of type int, found '3'"),
        ({"taps": [0.5]}, "taps must be a list of whole numbers"),
        ({"taps": []}, "must be at least 1"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0"),
        ({"kv_heads": 3}, "share keys evenly"),
        ({"scheme": "int9"}, "scheme 'int9' is unknown"),
        ({"head": "int9"}, "scheme 'int9' is unknown"),
        ({"taps": [1, 3]}, "does not fit"),
        ({"hidden_size": 32}, "does not fit"),
        ({"rank": 4}, "implies the tensor of_token of shape (8, 64), found (16, 64)"),
        ({"frequent": 321}, "frequent must be from 0 to the vocabulary's 320"),
        ({"frequent": 9}, "implies the tensor frequent of shape (9,), found none"),
        ({"target": "00"}, "were trained on other weights than those of int8"),
    ],
)
def test_wrong_descriptions_are_refused(target: Model, folder: Path, changes: dict[str, Any], said: str) -> None:
    load_network(folder, target)
    data = json.loads((folder / DESCRIPTION).read_text()) | changes
    (folder / DESCRIPTION).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(UserError) as error:
        load_network(folder, target)
    assert said in str(error.value) and "block" in str(error.value)


def test_descriptions_of_before_there_were_short_heads_are_read(folder: Path) -> None:
    data = json.loads((folder / DESCRIPTION).read_text())
    assert data.pop("frequent") == 0
    (folder / DESCRIPTION).write_text(json.dumps(data))
    assert read_description(folder).frequent == 0


@pytest.mark.parametrize("ids", [[3, 2, 5], [2, 2, 5], [-1, 2, 5], [2, 5, 320], [0.0, 1.0, 2.0]])
def test_frequent_tokens_that_are_none_are_refused(target: Model, tmp_path: Path, ids: list[Any]) -> None:
    folder = write_block(target.path, tmp_path / "short", frequent=3)
    load_network(folder, target)
    save_file(load_file(folder / WEIGHTS) | {"frequent": torch.tensor(ids)}, folder / WEIGHTS)
    with pytest.raises(UserError, match="frequent must be whole numbers below 320"):
        load_network(folder, target)


def test_targets_without_hidden_states_are_refused(folder: Path, tiny: Tiny) -> None:
    with pytest.raises(UserError, match="use another drafter"):
        load_network(folder, load(tiny("gpt2")))


# The network.


def test_the_network_says_what_it_was_trained_to_say(target: Model, folder: Path) -> None:
    """Places, memory and confidence, of a text whose window has begun and one that is shorter than it."""
    about, decoder = read_description(folder), target.decoder
    assert isinstance(decoder, BaseDecoder)
    trained = Trained(about, *tables(target.path, decoder))
    trained.load_state_dict({name: tensor.float() for name, tensor in read_weights(folder, about).items()})
    network, states = load_network(folder, target), torch.randn(40, 128)
    anchors, tokens = torch.tensor([[30, 5]]), torch.randint(0, 320, (1, 2, about.length))
    with torch.no_grad():
        wanted = trained(Blocks(states[None], anchors, tokens))
        said = functional.linear(wanted.rows, trained.head)
        right = trained.confidence(wanted.told, said.log_softmax(-1).amax(-1)).sigmoid()
    seen = []
    for end in anchors[0].tolist():
        first = max(0, end - about.window)
        fused = network.fused(states[first:end])
        seen.append(Seen(network.keys_values(fused, torch.arange(first, end)), fused[-1], end))
    for i, places in enumerate(network.draft(seen, tokens[0, :, 0].tolist(), about.length)):
        memory = np.zeros(about.rank, np.float32)
        for place in range(about.length):
            memory = network.memory.after(memory, int(tokens[0, i, place]), places.of_row[place])
            logits = torch.from_numpy(places.base[place] + network.memory.adds @ memory)
            # What the memory adds is held in bfloat16.
            assert torch.allclose(logits, said[i, place], atol=1e-2)
            sure = network.memory.is_right(places.rows[place], memory, float(logits.log_softmax(0).max()))
            assert sure == pytest.approx(float(right[i, place]), abs=3e-3)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4"])
def test_matrices_in_few_bits_say_nearly_the_same(target: Model, tmp_path: Path, scheme: str) -> None:
    known = load_network(write_block(target.path, tmp_path / "block"), target)
    other = load_network(write_block(target.path, tmp_path / "packed", scheme=scheme), target)
    states = torch.randn(7, 128)
    found = known.fused(states), other.fused(states)
    assert 1e-4 < float((found[0] - found[1]).norm() / found[0].norm()) < 0.2
    # So does the copy of the target's head; without a scheme there is none.
    logits = known.head(found[0]), other.head(found[0])
    assert 1e-4 < float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.2
    assert isinstance(target.decoder, BaseDecoder) and known.head is target.decoder.parts.head is not other.head


# Drafts.


class Chains(BlockDrafter):
    def __init__(self, network: BlockNetwork, verify: Any = "coupled") -> None:
        super().__init__(network, verify, branch=1)


@pytest.mark.parametrize(
    ("kind", "frequent"), [pytest.param(BlockDrafter, 0, marks=pytest.mark.slow), (Chains, 0), (BlockDrafter, 90)]
)
def test_texts_are_those_of_plain_decoding(
    target: Model, tmp_path: Path, kind: type[BlockDrafter], frequent: int
) -> None:
    """Greedy and sampled, in one batch, in pages; trees and chains are drafted, and something of them is right."""
    network = load_network(write_block(target.path, tmp_path / "block", frequent=frequent), target)
    prompts = [*PROMPTS, "x = 1\n" * 60]
    for rule in ("coupled", "rejection"):
        for sampling in SAMPLINGS if rule == "coupled" else SAMPLINGS[:1]:
            plain = Speculator(target).generate(prompts, 24, sampling, stop=())
            fast = Speculator(target, kind(network, rule), 6, rule, cache=CacheOptions(pages=40))
            found = fast.generate(prompts, 24, sampling, stop=())
            assert [r.tokens for r in found] == [r.tokens for r in plain]
            assert total([r.metrics for r in found]).drafted > 0


def test_a_network_that_knows_the_text_is_accepted(target: Model, folder: Path) -> None:
    """One that is told what follows."""
    [plain] = Speculator(target).generate([[5, 9, 7]], 30, stop=())
    network, text = load_network(folder, target), [5, 9, 7, *plain.tokens]

    class Knows(BlockDrafter):
        def _candidates(self, request: Request, path: list[int], *rest: Any) -> Any:
            found = super()._candidates(request, path, *rest)
            at = len(request.tokens) + len(path)
            right = text[at] if at < len(text) else 0
            return type(found)([right, *found.tokens], [0.9, *found.shares], [0.9, *found.promises])

    knows = Knows(network)
    knows._native = None  # trees of native kernels do not ask
    [result] = Speculator(target, knows, 6).generate([[5, 9, 7]], 30, stop=())
    assert result.tokens == plain.tokens and result.metrics.tokens_per_round > 4


@pytest.mark.parametrize("frequent", [0, 90])
def test_native_trees_are_those_of_torch(target: Model, tmp_path: Path, frequent: int) -> None:
    """Two texts whose states come in pieces of all sizes, some never, until the window has moved on several times."""
    network = load_network(write_block(target.path, tmp_path / "block", frequent=frequent), target)
    text, states = torch.randint(0, 320, (120,)).tolist(), torch.randn(120, 128)
    if BlockDrafter(network)._native is None:
        pytest.skip("these kernels are not native")
    for branch in (1, 4):
        made = [BlockDrafter(network, branch=branch) for _ in range(2)]
        made[1]._native, at = None, 0
        for drafter in made:
            drafter.worth = 1e-3  # random logits make no token probable
        for gap, count in ((0, 1), (0, 5), (0, 20), (2, 1), (0, 19), (0, 2), (0, 40), (1, 1), (0, 1), (0, 22)):
            at += gap
            requests = [Request(i, text[: at + count + 1], 1, Sampling(), 200) for i in range(2)]
            for drafter in made:
                drafter.read([TakenStates(request, at, states[at : at + count]) for request in requests])
            at += count
            found = [drafter.propose(requests, [8, 3]) for drafter in made]
            assert found[0] == found[1] and len(found[0][0].tokens) >= len(found[0][1].tokens) > 0


def surely(network: BlockNetwork, constant: float) -> BlockNetwork:
    """The network whose memory adds nothing to the logits, and which is always as sure as this."""
    memory, (of_row, of_memory, _, _) = network.memory, network.memory.sure
    sure = np.zeros_like(of_row), np.zeros_like(of_memory), 0.0, constant
    return replace(network, memory=replace(memory, adds=np.zeros_like(memory.adds), sure=sure))


def firsts(network: BlockNetwork, native: bool, length: int) -> list[list[int]]:
    """Chains of up to so many tokens behind 24 texts of random states."""
    drafter, random = BlockDrafter(network, branch=1), torch.Generator().manual_seed(3)
    drafter.worth = 1e-3  # random logits make no token probable
    if not native:
        drafter._native = None
    texts = torch.randint(0, 320, (24, 8), generator=random).tolist()
    requests = [Request(i, text, 1, Sampling(), 100) for i, text in enumerate(texts)]
    drafter.read([TakenStates(request, 0, torch.randn(7, 128, generator=random)) for request in requests])
    return [draft.tokens for draft in drafter.propose(requests, [length] * len(requests))]


@pytest.mark.parametrize("native", [True, False])
def test_a_short_head_drafts_what_the_whole_one_does(target: Model, tmp_path: Path, native: bool) -> None:
    """Wherever that is one of its tokens; elsewhere it drafts another of them."""
    whole = surely(load_network(write_block(target.path, tmp_path / "whole"), target), 9.0)
    short = surely(load_network(write_block(target.path, tmp_path / "short", frequent=160), target), 9.0)
    if native and BlockDrafter(whole)._native is None:
        pytest.skip("these kernels are not native")
    assert short.frequent is not None and short.head is not whole.head and short.whole is whole.head
    among, same = set(short.frequent.tolist()), 0
    pairs = list(zip(firsts(whole, native, 6), firsts(short, native, 6), strict=True))
    for known, found in ((a, b) for one in pairs for a, b in zip(*one, strict=True)):
        assert found in among and (found == known) is (known in among)
        same += known in among
    assert 0.2 < same / (24 * 6) < 0.8


@pytest.mark.parametrize("native", [True, False])
def test_an_unsure_short_head_asks_the_whole_one(target: Model, tmp_path: Path, native: bool) -> None:
    """For the first token; behind it the draft ends, for no token there is worth a row."""
    whole = surely(load_network(write_block(target.path, tmp_path / "whole"), target), 9.0)
    short = load_network(write_block(target.path, tmp_path / "short", frequent=160), target)
    if native and BlockDrafter(whole)._native is None:
        pytest.skip("these kernels are not native")
    known, found = firsts(whole, native, 6), firsts(surely(short, -9.0), native, 6)
    assert found == [tokens[:1] for tokens in known] and short.frequent is not None
    rare = [tokens for tokens in found if tokens[0] not in short.frequent]
    assert 4 < len(rare) < 20


def test_drafts_are_trees_within_their_budgets(target: Model, folder: Path) -> None:
    drafter, states = BlockDrafter(load_network(folder, target)), torch.randn(9, 128)
    request = Request(1, list(range(1, 11)), 10, Sampling(), 20)
    assert drafter.propose([request], [5])[0].tokens == []
    drafter.read([TakenStates(request, 0, states[:4]), TakenStates(request, 4, states[4:])])
    [draft] = drafter.propose([request], [5])
    require_sound(draft, 5, 320)
    assert draft.tokens and max(draft.depths) < 5
    # One whose last state is missing is not drafted for, nor one that another text stands before.
    request.tokens.append(3)
    assert drafter.propose([request], [5])[0].tokens == []
    drafter.read([TakenStates(request, 10, states[:1])])
    assert drafter.propose([request], [5])[0].tokens == []
    # With the next token it begins anew behind the gap.
    request.tokens.append(3)
    assert drafter.propose([request, request], [3, 0])[0].tokens != []
    drafter.close(request)
    assert drafter.propose([request], [5])[0].tokens == []


def test_drafts_do_not_depend_on_how_states_came(target: Model, folder: Path) -> None:
    """At once, token by token with drafts between, or the window alone: the same draft."""
    network, states = load_network(folder, target), torch.randn(60, 128)
    window, text = network.about.window, torch.randint(0, 320, (61,)).tolist()

    def drafted(first: int, pieces: list[int], asked: bool) -> tuple[list[int], list[int]]:
        drafter, at = BlockDrafter(network), first
        for count in pieces:
            request = Request(1, text[: at + count + 1], 1, Sampling(), 100)
            drafter.read([TakenStates(request, at, states[at : at + count])])
            at += count
            if asked or at == 60:
                [draft] = drafter.propose([request], [6])
        return draft.tokens, draft.parents

    known = drafted(0, [60], False)
    assert known[0]
    assert known == drafted(0, [1, 2, 30, 20, 1, 6], False) == drafted(0, [2] * 30, True)
    assert known == drafted(60 - window, [window], False)


def test_states_that_never_came_leave_a_gap(target: Model, folder: Path) -> None:
    """Whether a draft was asked for before the gap or not; beyond the window nothing before it is seen."""
    network, states = load_network(folder, target), torch.randn(8, 90, 128)
    texts = torch.randint(0, 320, (8, 91)).tolist()

    def drafted(pieces: list[tuple[int, int]], asked: bool) -> list[Draft]:
        drafter, found = BlockDrafter(network), list[Draft]()
        for first, end in pieces:
            requests = [Request(i, text[: end + 1], 1, Sampling(), 100) for i, text in enumerate(texts)]
            drafter.read([TakenStates(request, first, states[request.id, first:end]) for request in requests])
            if asked or end == pieces[-1][1]:
                found = drafter.propose(requests, [6] * len(requests))
        return found

    window = network.about.window
    short = [(0, 6), (8, 9), (9, 12)]
    assert drafted(short, True) == drafted(short, False) != drafted(short[1:], False)
    far = [(0, 6), (6 + window, 9 + window)]
    assert drafted(far, True) == drafted(far, False) == drafted(far[1:], False)


def test_heads_of_a_target_by_name(target: Model, folder: Path) -> None:
    found = drafter_by_name(target, "block", draft=folder).drafter
    assert isinstance(found, BlockDrafter)
    chained = drafter_by_name(target, "lookup+block", draft=folder).drafter
    assert isinstance(chained, ChainedDrafter) and chained.taps == found.taps
    assert isinstance(chained.drafters[0], LookupDrafter)
    with pytest.raises(UserError, match="block-draft"):
        drafter_by_name(target, "block")
    with pytest.raises(UserError, match="leave out one"):
        drafter_by_name(target, "lookup", draft=folder)


def test_damaged_weights_are_said(target: Model, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["norm"][0] = torch.nan
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    drafter = BlockDrafter(load_network(folder, target))
    request = Request(1, [1, 2], 2, Sampling(), 20)
    drafter.read([TakenStates(request, 0, torch.randn(1, 128))])
    with pytest.raises(UserError, match="NaN"):
        drafter.propose([request], [4])


def test_descriptions_that_are_none() -> None:
    known: dict[str, Any] = {"taps": (1,), "length": 4, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8}
    known |= {
        "intermediate_size": 8,
        "window": 4,
        "rank": 2,
        "hidden_size": 8,
        "vocab_size": 9,
        "scheme": "",
        "head": "",
    }
    assert Description(**known, target="").layers == 1
    for change in ({"length": 0}, {"taps": ()}, {"head_dim": 7}):
        with pytest.raises(ValueError, match="found"):
            Description(**known | change, target="")
