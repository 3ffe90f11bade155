"""The stage block_draft: what is learned from, the loss, where the network begins, whole runs on a tiny model."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from compress import block_draft
from compress.block_draft.beginning import begin, last_layer
from compress.block_draft.frequent import covered, frequent_tokens
from compress.block_draft.frozen_head import judge
from compress.block_draft.network import BlockNetwork, Blocks
from compress.block_draft.objective import Teacher, blocks_of, learn
from compress.block_draft.task import BlockTask, Head
from compress.context import RunContext
from compress.errors import USER_ERRORS
from compress.medusa.hidden_states import HiddenStates, Source, collect
from compress.medusa.own_text import Text
from compress.pipeline import compress
from compress.recipe import Recipe
from compress.recipe.block_draft import BlockDraft
from compress.recipe.training import Budget, Settings
from compress.training.contract import StageContext
from runtime import Model, Speculator, load
from runtime.checkpoints.block_draft import DESCRIPTION, WEIGHTS, Description, read_description
from runtime.contract import Rows
from runtime.engine.metrics import total
from runtime.model.base import BaseDecoder
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import load_network, tables
from runtime.speculative.drafters.by_name import drafter_by_name

Tiny = Callable[..., Path]
UNTIED = {"tie_word_embeddings": False}
SIZES: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 12, "window": 6}
SIZES |= {"rank": 4, "hidden_size": 16, "vocab_size": 20, "scheme": "", "head": "", "target": ""}


def network(length: int = 3, seed: int = 0) -> BlockNetwork:
    torch.manual_seed(seed)
    made = BlockNetwork(Description((1, 2), length, **SIZES), torch.randn(20, 16), torch.randn(20, 16))
    with torch.no_grad():
        made.add.normal_()
    return made


# What is learned from.


def test_blocks_begin_at_their_anchors_and_end_with_the_window() -> None:
    tokens = torch.arange(20).view(2, 10) + 100
    blocks, places = blocks_of(tokens, torch.zeros(2, 10, 4), torch.tensor([[1, 7], [3, 9]]), 3)
    assert blocks.tokens.tolist()[0] == [[101, 102, 103], [107, 108, 109]]
    assert places.tolist() == [[[2, 3, 4], [8, 9, 10]], [[4, 5, 6], [10, 10, 10]]]


def test_a_draft_depends_on_what_it_may_see_alone() -> None:
    """Neither on states at the anchor and behind it, nor on those before the window, nor on later tokens."""
    made, states, tokens = network(), torch.randn(1, 20, 32), torch.randint(0, 20, (1, 2, 3))
    anchors = torch.tensor([[12, 5]])

    def said(changed: torch.Tensor, given: torch.Tensor = tokens) -> torch.Tensor:
        with torch.no_grad():
            return made(Blocks(changed, anchors, given)).rows

    known = said(states)
    for place, moves in ((12, False), (11, True), (6, True), (13, False)):
        changed = states.clone()
        changed[0, place] += 1
        assert torch.allclose(said(changed)[0], known[0], atol=1e-5) is not moves
    # Six tokens before place 12 begin at 6: what stands at 5 is the other block's anchor, which does not see it either.
    changed = states.clone()
    changed[0, 5] += 1
    assert torch.allclose(said(changed), known, atol=1e-5)
    other = tokens.clone()
    other[0, 0, 2] = (other[0, 0, 2] + 1) % 20
    assert torch.equal(said(states, other)[0, :2], known[0, :2])
    assert not torch.allclose(said(states, other)[0, 2], known[0, 2], atol=1e-3)


@pytest.mark.parametrize("distill", [None, 0.0, 0.25, 1.0])
def test_losses_and_gradients_through_the_head_are_torchs(distill: float | None) -> None:
    """Of more rows than are looked at together; None: without a teacher."""
    torch.manual_seed(1)
    rows, head, tokens = torch.randn(517, 12, requires_grad=True), torch.randn(33, 12), torch.randint(0, 33, (517,))
    teacher, counted = None if distill is None else torch.randn(517, 12), torch.rand(517)
    found = judge(rows, head, tokens, teacher, distill or 0.0)
    (found.loss * counted).sum().backward()
    mine, rows.grad = rows.grad, None
    said = functional.linear(rows, head).log_softmax(-1)
    wanted, divergence = tokens, torch.zeros(517)
    if teacher is not None:
        known = functional.linear(teacher, head).log_softmax(-1)
        wanted, divergence = known.argmax(-1), (known.exp() * (known - said)).sum(-1)
    cross = functional.nll_loss(said, wanted, reduction="none")
    ((((1 - (distill or 0.0)) * cross) + (distill or 0.0) * divergence) * counted).sum().backward()
    assert mine is not None and rows.grad is not None and torch.allclose(mine, rows.grad, atol=1e-5)
    assert torch.equal(found.wanted, wanted) and torch.equal(found.choice, said.argmax(-1))
    for mine, theirs in ((found.cross, cross), (found.divergence, divergence), (found.best, said.amax(-1))):
        assert torch.allclose(mine, theirs.detach(), atol=1e-4)


def test_what_a_short_head_says_is_of_its_tokens() -> None:
    """The loss stays that of the whole one."""
    torch.manual_seed(2)
    rows, head, tokens = torch.randn(300, 12), torch.randn(33, 12), torch.randint(0, 33, (300,))
    teacher, frequent = torch.randn(300, 12), torch.randperm(33)[:20].sort().values
    whole, short = (judge(rows, head, tokens, teacher, 0.5, ids) for ids in (None, frequent))
    said = functional.linear(rows, head)[:, frequent].log_softmax(-1)
    assert torch.equal(short.choice, frequent[said.argmax(-1)]) and torch.allclose(short.best, said.amax(-1), atol=1e-5)
    assert torch.equal(short.loss, whole.loss) and torch.equal(short.wanted, whole.wanted)
    assert not torch.equal(short.choice, whole.choice)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
def test_frequent_tokens_are_the_fewest_that_cover_the_share(share: float) -> None:
    text = (torch.rand(40, 500) ** 4 * 1000).long()
    found = frequent_tokens(text, 1100, share)
    assert found is not None and len(found) % 64 == 0 and bool((found[1:] > found[:-1]).all())
    counts = torch.bincount(text.flatten(), minlength=1100)
    assert counts[found].sum() >= share * text.numel()
    most = counts.sort(descending=True).values
    assert counts[found].sum() == most[: len(found)].sum()
    assert len(found) == 64 or most[: len(found) - 64].sum() < share * text.numel()
    assert frequent_tokens(text, 1100, 1.0) is None is frequent_tokens(text, 64, share)


def test_small_vocabularies_are_read_whole_where_nothing_is_said() -> None:
    said = [covered(STAGE, 4096), covered(STAGE, 32_000), covered(STAGE.model_copy(update={"frequent": 0.9}), 4096)]
    assert said == [1.0, 0.99, 0.9]


@pytest.mark.parametrize("taught", [True, False])
def test_the_loss_is_what_it_says(taught: bool) -> None:
    """Places behind the window do not count; what is wanted is what the target finds most probable, or the text's."""
    made = network()
    tokens, states = torch.randint(0, 20, (1, 8)), torch.randn(1, 8, 32)
    blocks, places = blocks_of(tokens, states, torch.tensor([[1, 5]]), 3)
    assert places.tolist() == [[[2, 3, 4], [6, 7, 8]]]
    rows = torch.randn(1, 8, 16) if taught else None
    found = learn(made, blocks, places, Teacher(tokens, made.head, rows), decay=0.5, distill=0.25)
    with torch.no_grad():
        drafted = made(blocks)
        logits = functional.linear(drafted.rows, made.head).log_softmax(-1)
        sure = made.confidence(drafted.told, logits.amax(-1))
    cross = distill = confidence = weights = 0.0
    for block, row in enumerate(places[0].tolist()):
        for place, at in enumerate(row):
            if at == 8:
                continue
            said, weight, token = logits[block, place], 0.5**place, int(tokens[0, at])
            if rows is not None:
                known = functional.linear(rows[0, at - 1], made.head).log_softmax(-1)
                token = int(known.argmax())
                distill += weight * float((known.exp() * (known - said)).sum())
            cross -= weight * float(said[token])
            right = bool(said.argmax() == token)
            p = 1 / (1 + math.exp(-float(sure[block, place])))
            confidence -= weight * math.log(p if right else 1 - p)
            weights += weight
            assert bool(found.right[block, place]) == right
    assert [found.cross_entropy, found.distillation, found.confidence] == pytest.approx(
        [cross / weights, distill / weights, confidence / weights], rel=1e-3, abs=1e-5
    )
    expected = (0.75 * cross + 0.25 * distill if taught else cross) + confidence
    assert float(found.value.detach()) == pytest.approx(expected / weights, rel=1e-3)


def test_drafts_begin_rather_where_the_target_was_unsure() -> None:
    """Of a window whose tokens the target was sure of but for every fourth one."""
    torch.manual_seed(0)
    made = network()
    table = 10 * torch.randn(20, 16)
    states, tokens = torch.zeros(1, 41, 32), torch.randint(0, 20, (1, 41))
    for place in range(41):
        if (place + 1) % 4:  # whoever is sure after this place is sure of the token at the next one
            states[0, place, 16:] = table[int(tokens[0, (place + 1) % 41])]
    head = Head(table, torch.ones(16), None, is_rms=True, eps=1e-6, layers=2)
    nothing = HiddenStates(Path("nowhere"))
    text = Text(
        nothing, nothing, tokens, tokens, first=4, begins=(torch.tensor([5, 9]), torch.tensor([5])), prompts=(5,)
    )
    counts = {}
    for layers in (2, 3):  # of a target with three the final states were not kept
        task = BlockTask(made, STAGE, text, replace(head, layers=layers), autocast=False)
        found = torch.cat([task.anchors([0], tokens, states) for _ in range(200)])
        assert int(found.min()) >= 4 and int(found.max()) < 40
        later = torch.cat([task.anchors([1], tokens, states) for _ in range(50)])
        assert int(found.min()) == 4 and int(later.min()) == 8
        counts[layers] = float((found % 4 == 0).float().mean())
    assert counts[3] == pytest.approx(0.25, abs=0.03) and counts[2] > 0.45


def test_tokens_a_round_are_those_right_up_to_the_first_that_is_not() -> None:
    made = network()
    tokens, states = torch.randint(0, 20, (1, 8)), torch.randn(1, 8, 32)
    blocks, places = blocks_of(tokens, states, torch.tensor([[1, 4, 5]]), 3)
    found = learn(made, blocks, places, Teacher(tokens, made.head, None), 0.5, 0.0)
    right = torch.tensor([[True, True, False], [True, True, True], [True, True, False]])
    there = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    assert replace(found, right=right, there=there).tokens_per_round == 1 + (2 + 3) / 2


def test_confidence_teaches_nothing_but_itself() -> None:
    made = network()
    drafted = made(Blocks(torch.randn(1, 9, 32), torch.tensor([[5]]), torch.randint(0, 20, (1, 1, 3))))
    made.confidence(drafted.told, torch.randn(1, 3)).sum().backward()
    assert made.sure.grad is not None and all(p.grad is None for n, p in made.named_parameters() if n != "sure")


# Where it begins.


@pytest.fixture(scope="module")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder: a tiny llama at int8 whose head is its own."""
    out = tmp_path_factory.mktemp("block") / "run"
    options: dict[str, Any] = {"seq_len": 64, "draft": "none", "report": lambda *_: {}}
    return compress(tiny("llama", **UNTIED), Recipe.load("int8-dynamic"), out, **options).model.parent


@pytest.fixture(scope="module")
def target(packed: Path) -> Model:
    return load(packed)


def test_the_first_layer_begins_as_the_models_last(target: Model, packed: Path, tiny: Tiny) -> None:
    """Its keys and values of fused states are those of the model's last layer, as the reference computes them."""
    stage = BlockDraft.model_validate({"rank": 4, "window": 8})
    assert isinstance(target.decoder, BaseDecoder)
    about = block_draft.description(stage, target, target.decoder)
    assert about.taps == (1, 2) and (about.heads, about.kv_heads, about.head_dim) == (4, 2, 16)
    torch.manual_seed(0)
    made, layer = BlockNetwork(about, *tables(target.path, target.decoder)), last_layer(packed / "model")
    assert layer is not None
    with torch.no_grad():
        made.fuse.zero_()
    tokens, states = torch.randint(0, 97, (40, 12)), torch.randn(40, 12, 128)
    assert begin(made, layer, tokens, states)
    stream = torch.randn(5, 64)
    fused = made.fused(torch.cat((stream, torch.randn(5, 64)), dim=1))
    expected = functional.rms_norm(stream, (64,), layer["attention_norm"], 1e-5)
    assert torch.allclose(fused, expected, atol=1e-3)
    assert torch.equal(made.layers[0].key, layer["key"]) and torch.equal(made.norm, layer["norm"])
    assert not begin(network(), layer, tokens, states)
    assert last_layer(tiny("qwen3")) is None and last_layer(tiny("mistral")) is not None


def test_rows_begin_as_the_nearest_to_what_the_last_layer_reads(target: Model, packed: Path) -> None:
    """Which is all of it, where that depends on the anchor's token and the state before it in a straight line."""
    stage = BlockDraft.model_validate({"rank": 4, "window": 8})
    assert isinstance(target.decoder, BaseDecoder)
    torch.manual_seed(0)
    about = block_draft.description(stage, target, target.decoder)
    made, layer = BlockNetwork(about, *tables(target.path, target.decoder)), last_layer(packed / "model")
    assert layer is not None
    with torch.no_grad():
        made.fuse.zero_()
    tokens, states = torch.randint(0, 97, (200, 6)), 40 * torch.randn(200, 6, 128)
    of_token, of_state = torch.randn(64, 64), torch.randn(64, 64)
    for place in range(1, 6):
        before = functional.rms_norm(states[:, place - 1, :64], (64,), layer["attention_norm"], 1e-5)
        told = functional.linear(made.embedded(tokens[:, place]), of_token) + functional.linear(before, of_state)
        states[:, place, :64] = 3 * told + 5
    assert begin(made, layer, tokens, states)
    found = made.stored()
    with torch.no_grad():
        token, state = made.embedded(tokens[:, 1:]), made.fused(states[:, :-1])
        rows = functional.linear(token, found["anchor"]) + functional.linear(state, found["last"]) + found["places"][0]
    assert functional.mse_loss(rows, states[:, 1:, :64]) < 1e-4 * states[:, 1:, :64].var()
    # The network's own matrices are of the usual size, however large the stream is.
    assert made.spread > 10 and made.anchor.abs().mean() < 1


# The stage.


def windows(n: int, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 12, (n, length), generator=torch.Generator().manual_seed(seed))


SETTINGS = Settings(learning_rate=2e-2, batch=8, length=24, evaluate_every=20, save_every=20)
STAGE = BlockDraft.model_validate({"samples": 300, "rank": 16, "window": 12, "anchors": 8, "draft_length": 4})


@pytest.fixture
def given(packed: Path, tiny: Tiny, tmp_path: Path) -> StageContext:
    """What the pipeline gives to a stage, on a text in which every token is a function of the one before."""
    model, rule = shutil.copytree(packed, tmp_path / "run") / "model", [1]
    while len(rule) < 24 * 400:
        rule.append((rule[-1] + 7) % 97)
    run = RunContext(Recipe.load("int4-block-draft"))
    held_out = torch.tensor(rule[7:607]).view(12, 50)
    work, budget = tmp_path / "work", Budget(tokens=24 * 8 * 100)
    return StageContext(run, tiny("llama"), model, None, np.array(rule), held_out, work, SETTINGS, budget)


def test_a_drafter_learns_and_changes_no_text(given: StageContext, tmp_path: Path) -> None:
    out, notes = tmp_path / "block", list[str]()
    given = replace(given, run=replace(given.run, note=notes.append))
    stage = STAGE.model_copy(update={"continuations": "none", "distill": 0.0})
    found = block_draft.run(stage, given, out)
    json.dumps(found)
    assert found["windows"] == 300 and found["steps"] == 100 and found["begins_as_the_last_layer"]
    assert found["best"] < 0.7 * found["before"]
    about = read_description(out)
    assert about.length == 4 and about.rank == 16
    target = load(given.model)
    prompts = windows(6, 8, seed=7).tolist()
    expected = Speculator(target).generate(prompts, 40, stop=())
    drafter = BlockDrafter(load_network(out, target))
    drafted = Speculator(target, drafter, 8).generate(prompts, 40, stop=())
    assert [one.tokens for one in drafted] == [one.tokens for one in expected]
    assert total([one.metrics for one in drafted]).drafted > 0
    assert any("300 windows of 24 tokens" in line for line in notes)
    # In the run folder it is what drafts.
    shutil.copytree(out, given.model.parent / "block")
    assert isinstance(drafter_by_name(load(given.model)).drafter, BlockDrafter)


def test_prompts_of_several_lengths_and_a_short_head(given: StageContext, tmp_path: Path) -> None:
    """By turns, and what measures the drafter has them all; the head keeps 64 of 97 tokens."""
    stage = STAGE.model_copy(update={"prompt": (0.25, 0.5), "as_is": 0.0, "samples": 20, "frequent": 0.3})
    given = replace(given, budget=Budget(tokens=24 * 8 * 2))
    found = block_draft.run(stage, given, tmp_path / "block")
    assert found["windows"] == 20 and found["head_tokens"] == 64
    target, kept = load(given.model), HiddenStates(given.work / "states").tokens()
    for number in range(4):
        size = (6, 12)[number % 2]
        prompt = kept[number, :size].tolist()
        assert kept[number, size:].tolist() == Speculator(target).generate([prompt], 24 - size, stop=())[0].tokens
    about = read_description(tmp_path / "block")
    assert about.frequent == 64 and load_network(tmp_path / "block", target).frequent is not None


def test_tokens_a_round_grow_on_what_the_target_writes(given: StageContext, tmp_path: Path) -> None:
    given = replace(given, tokens=windows(1, 24 * 400)[0].numpy(), held_out=windows(12, 50, 1))
    found = block_draft.run(STAGE, given, tmp_path / "block")
    assert found["tokens_per_round"]["after"] > 1.03 * found["tokens_per_round"]["before"]


@pytest.mark.slow
def test_a_stopped_stage_goes_on_to_the_same_bytes(
    given: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(given, budget=Budget(tokens=24 * 8 * 30))
    block_draft.run(STAGE, replace(given, work=tmp_path / "one"), tmp_path / "a")
    steps = 0

    class Stopping(BlockTask):
        def loss(self, batch: torch.Tensor, progress: float) -> Any:
            nonlocal steps
            steps += 1
            if steps == 23:
                raise KeyboardInterrupt
            return super().loss(batch, progress)

    with monkeypatch.context() as patch:
        patch.setattr(block_draft, "BlockTask", Stopping)
        with pytest.raises(KeyboardInterrupt):
            block_draft.run(STAGE, replace(given, work=tmp_path / "two"), tmp_path / "b")
    block_draft.run(STAGE, replace(given, work=tmp_path / "two"), tmp_path / "b")
    for name in (DESCRIPTION, WEIGHTS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert steps == 23


def test_the_teacher_is_the_target(target: Model, tmp_path: Path) -> None:
    """Its logits of kept states are those of a forward, but for float16."""
    decoder = target.decoder
    assert isinstance(decoder, BaseDecoder)
    source = Source(windows(3), "none", (6,))
    found = collect(target, source, tmp_path, {}, None, lambda *_: None, (1, 2))
    tokens, states = found.read([2])
    assert states.shape == (1, 24, 128)
    cache = decoder.new_cache()
    out = decoder.forward(tokens[0], Rows.chains([(cache.open(24), 0, 24)]), cache)
    head = Head.of(decoder, tables(target.path, decoder)[1].float())
    assert torch.allclose(functional.linear(head.rows(states[0, :, 64:]), head.table), out.logits, atol=0.02)


# Mistakes.


def test_what_goes_wrong_is_said(given: StageContext, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "block"

    def refused(stage: BlockDraft = STAGE, **changes: Any) -> str:
        with pytest.raises(USER_ERRORS) as error:
            block_draft.run(stage, replace(given, **changes), out)
        return str(error.value)

    assert "at most the model's 2 layers, found [1, 3]" in refused(STAGE.model_copy(update={"taps": (1, 3)}))
    assert "in the last place" in refused(STAGE.model_copy(update={"taps": (2, 1)}))
    assert "Specpress' own kernels" in refused(model=tiny("gpt2"))
    assert "the training text is too short" in refused(tokens=given.tokens[:20])
    assert "at least 5 tokens beside the prompt's 3" in refused(settings=replace(SETTINGS, length=5))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layers": 4}, "layers"),
        ({"scheme": "int8-static"}, "no calibration"),
        ({"scheme": "int9"}, "scheme"),
        ({"taps": [1, 1]}, "different numbers"),
        ({"distill": 2}, "distill"),
        ({"colour": 1}, "colour"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, Any], said: str) -> None:
    assert BlockDraft.model_validate({"taps": [0, 2]}).taps == (0, 2)
    with pytest.raises(ValidationError, match=said):
        BlockDraft.model_validate(keys)
