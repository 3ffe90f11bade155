"""The stage draft on tiny models: drafts learn their packed target, on whoever's text, and new ones are made."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from compress.context import RunContext
from compress.distill import draft, draft_init
from compress.distill.draft import DraftTask
from compress.distill.teacher import of_model
from compress.errors import UserError
from compress.recipe import Recipe
from compress.recipe.training import Budget
from compress.recipe.training_stages import Draft
from compress.report.training_words import training_findings
from compress.training import float_model
from compress.training.contract import StageContext
from runtime import load
from runtime.errors import UserError as RuntimeUserError

HELD_OUT = torch.randint(0, 320, (6, 32), generator=torch.Generator().manual_seed(9))


TRAINING = {"tokens": 4096, "batch": 8, "length": 32, "learning_rate": 3e-3, "evaluate_every": 8, "autocast": False}


def stage(**keys: Any) -> Draft:
    return Draft.model_validate({"samples": 16, "prompt": 8, "training": TRAINING} | keys)


def given(model: Path, small: Path | None, work: Path, chosen: Draft, original: Path | None = None) -> StageContext:
    tokens = np.random.default_rng(0).integers(0, 320, 6000).astype(np.uint16)
    return StageContext(
        run=RunContext(Recipe.load("int4-aligned-draft")),
        original=original or model,
        model=model,
        draft=small,
        tokens=tokens,
        held_out=HELD_OUT,
        work=work,
        settings=chosen.training.settings(0),
        budget=chosen.training.budget(),
    )


def with_run(context: StageContext, **changes: Any) -> StageContext:
    return dataclasses.replace(context, run=dataclasses.replace(context.run, **changes))


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> tuple[Path, Path]:
    """A target, and a draft of one block that knows nothing of it."""
    return tiny("llama"), tiny("llama", seed=5, num_hidden_layers=1, hidden_size=32, intermediate_size=64)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": "forward_kl", "on_policy_fraction": 0.5, "teacher": 0.0},
        {"loss": "reverse_kl", "on_policy_fraction": 0.0, "teacher": 0.5, "cross_entropy": 0.1},
        {"loss": "jsd", "beta": 0.7, "on_policy_fraction": 0.3, "teacher": 0.3},
        {"loss": "total_variation", "on_policy_fraction": 0.0, "teacher": 0.0, "optimizer": "muon"},
        {"loss": "minillm", "on_policy_fraction": 0.5, "teacher": 0.0},
    ],
    ids=lambda keys: keys["loss"],
)
def test_a_draft_learns_its_target(models: tuple[Path, Path], tmp_path: Path, keys: dict[str, Any]) -> None:
    target, small = models
    chosen = stage(**keys)
    told = draft.run(chosen, given(target, small, tmp_path / "work", chosen), tmp_path / "out")
    assert told["best"] < 0.97 * told["before"]
    before, after = told["acceptance"]["before"], told["acceptance"]["after"]
    assert after["agreement_t1"] > before["agreement_t1"]
    assert told["steps"] == 16
    assert (told["samples"] is None) == (chosen.teacher == 0)
    [said] = training_findings(json.loads(json.dumps({"draft": told})))
    assert f"{before['agreement']:.3f} to {after['agreement']:.3f}" in said
    # What was written is an ordinary directory of the draft's own shapes and types, with other weights.
    old, new = (load_file(path / "model.safetensors") for path in (small, tmp_path / "out"))
    assert {name: (t.shape, t.dtype) for name, t in old.items()} == {n: (t.shape, t.dtype) for n, t in new.items()}
    assert not torch.equal(old["model.norm.weight"], new["model.norm.weight"])
    assert load(tmp_path / "out").tokenizer.vocab_size == 320


def test_equal_runs_are_equal_bytes(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, small = models
    chosen = stage(on_policy_fraction=0.4, teacher=0.4)
    for name in "ab":
        draft.run(chosen, given(target, small, tmp_path / name, chosen), tmp_path / f"out-{name}")
    first, second = ((tmp_path / f"out-{name}" / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_an_interrupted_run_goes_on_to_the_same_bytes(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, small = models
    chosen = stage(on_policy_fraction=0.4, teacher=0.4, training=TRAINING | {"save_every": 4})
    draft.run(chosen, given(target, small, tmp_path / "a", chosen), tmp_path / "out-a")

    def stop(kind: str, done: int, total: int) -> None:
        if kind == "draft" and done == 10:
            raise KeyboardInterrupt

    whole = given(target, small, tmp_path / "b", chosen)
    with pytest.raises(KeyboardInterrupt):
        draft.run(chosen, with_run(whole, progress=stop), tmp_path / "out-b")
    assert not (tmp_path / "out-b").exists()
    said: list[str] = []
    draft.run(chosen, with_run(whole, note=said.append), tmp_path / "out-b")
    assert any("goes on after step 8 of 16" in line for line in said)
    first, second = ((tmp_path / f"out-{name}" / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_evaluation_is_the_divergence_from_the_teacher(models: tuple[Path, Path]) -> None:
    target, small = models
    teacher, student = float_model.load(target), float_model.load(small)
    task = DraftTask(stage(on_policy_fraction=0, teacher=0), student, of_model(teacher), HELD_OUT, set())
    with torch.no_grad():
        p, q = (model(HELD_OUT).logits.double().log_softmax(-1) for model in (teacher, student))
    assert task.evaluate() == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    same = DraftTask(
        stage(on_policy_fraction=0, teacher=0), teacher, of_model(float_model.load(target)), HELD_OUT, set()
    )
    assert same.evaluate() == pytest.approx(0, abs=1e-5)


def test_who_writes_what_is_fixed_by_the_seed(models: tuple[Path, Path]) -> None:
    target, small = models
    asked: list[int] = []

    def writer(prompts: torch.Tensor, new: int, generator: torch.Generator) -> torch.Tensor:
        asked.append(int(torch.randint(2**31, (), generator=generator)))
        return torch.cat([prompts, torch.zeros(len(prompts), new, dtype=torch.int64)], dim=1)

    task = DraftTask(
        stage(on_policy_fraction=0.5, teacher=0),
        float_model.load(small),
        of_model(float_model.load(target)),
        HELD_OUT,
        set(),
        writer,
    )
    batch = HELD_OUT[:, :32]
    losses = []
    for seed in [*range(12), *range(12)]:
        torch.manual_seed(seed)
        losses.append(float(task.loss(batch, 0.0).value.detach()))
    assert losses[:12] == losses[12:]
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]
    assert 2 < len(set(asked)) < 10
    with pytest.raises(ValueError, match="writer and samples"):
        DraftTask(stage(on_policy_fraction=0.5, teacher=0), None, of_model(float_model.load(target)), HELD_OUT, set())


def test_whose_text_by_shares(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    student = float_model.load(models[1])
    seen: list[str] = []

    def writer(prompts: torch.Tensor, new: int, generator: torch.Generator) -> torch.Tensor:
        seen[-1] = "student"
        return torch.cat([prompts, prompts.new_zeros(len(prompts), new)], dim=1)

    class Written(draft.Samples):
        def take(self, numbers: torch.Tensor) -> torch.Tensor:
            seen[-1] = "teacher"
            return super().take(numbers)

    samples = Written(np.zeros((4, 32), np.int32), 0.0)
    monkeypatch.setattr(DraftTask, "_logits", lambda self, tokens: (torch.zeros(1, 2), torch.ones(1, 2)))
    task = DraftTask(
        stage(on_policy_fraction=0.25, teacher=0.5), student, lambda tokens: tokens, HELD_OUT, set(), writer, samples
    )
    for number in range(100):
        seen.append("text")
        monkeypatch.setattr(torch, "rand", lambda *shape, at=number: torch.tensor(at / 100))
        task.loss(HELD_OUT[:1], 0.0)
    assert {who: seen.count(who) for who in set(seen)} == {"student": 25, "teacher": 50, "text": 25}


def test_a_new_draft_is_the_target_without_blocks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny("llama", num_hidden_layers=4)
    draft_init.write_draft(source, (1, 3), tmp_path / "two", 2**30)
    whole, short = float_model.load(source), float_model.load(tmp_path / "two")
    assert short.config.num_hidden_layers == 2
    whole.model.layers = torch.nn.ModuleList([whole.model.layers[1], whole.model.layers[3]])
    with torch.no_grad():
        assert torch.equal(whole(HELD_OUT, use_cache=False).logits, short(HELD_OUT, use_cache=False).logits)
    assert load(tmp_path / "two").tokenizer.vocab_size == 320


def test_which_blocks_a_new_draft_has(tiny: Callable[..., Path]) -> None:
    model = float_model.load(tiny("llama", num_hidden_layers=8))
    assert draft_init.choose_blocks(model, HELD_OUT, 4, "even") == (0, 2, 4, 6)
    assert draft_init.choose_blocks(model, HELD_OUT, 3, "even") == (0, 2, 5)
    assert draft_init.choose_blocks(model, HELD_OUT, 8, "influence") == tuple(range(8))
    with torch.no_grad():
        for number in range(8):
            if number not in (2, 5):
                for name in ("self_attn.o_proj", "mlp.down_proj"):
                    model.get_submodule(f"model.layers.{number}.{name}").weight.mul_(0.01)
    assert draft_init.choose_blocks(model, HELD_OUT, 2, "influence") == (2, 5)
    assert [draft_init.count_of(0.25, layers) for layers in (1, 2, 4, 22, 32)] == [1, 1, 1, 6, 8]
    with pytest.raises(ValueError, match="1 to 8"):
        draft_init.choose_blocks(model, HELD_OUT, 9, "even")


def test_a_run_without_a_draft_makes_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny("llama", num_hidden_layers=4)
    chosen = stage(on_policy_fraction=0, teacher=0)
    told = draft.run(chosen, given(target, None, tmp_path / "work", chosen), tmp_path / "out")
    assert len(told["made_of"]) == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 1
    assert told["best"] < told["before"]


def test_drafts_of_another_vocabulary_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    other = shutil.copytree(tiny("llama", seed=5), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    chosen = stage(on_policy_fraction=0, teacher=0)
    with pytest.raises(RuntimeUserError, match="vocabular"):
        draft.run(chosen, given(tiny("llama"), other, tmp_path / "work", chosen), tmp_path / "out")


def test_samples_come_out_of_the_minutes() -> None:
    samples = draft.Samples(np.zeros((1, 4), np.int32), seconds=60.0)
    assert draft._left(Budget(minutes=5), samples) == Budget(minutes=4)
    assert draft._left(Budget(minutes=5), None) == Budget(minutes=5)
    assert draft._left(Budget(tokens=500), samples) == Budget(tokens=500)
    with pytest.raises(UserError, match=r"draft\.training\.minutes"):
        draft._left(Budget(minutes=1), samples)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"on_policy_fraction": 0.7, "teacher": 0.6}, "sum to 1 at most"),
        ({"loss": "minillm", "on_policy_fraction": 0.0}, "share above 0 with loss minillm"),
        ({"loss": "minillm", "on_policy_fraction": 0.5, "temperature": 2.0}, "expected 1 with loss minillm"),
        ({"prompt": 32}, "fewer tokens than training.length"),
        ({"loss": "kl"}, "forward_kl"),
        ({"beta": 1.0}, "less than 1"),
        ({"gamma": 4}, "gamma"),
    ],
)
def test_what_a_recipe_may_not_say(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        stage(**keys)


def test_defaults() -> None:
    plain = Draft.model_validate({})
    assert plain.training.budget() == Budget(minutes=15)
    assert plain.loss == "forward_kl"
    assert math.isclose(plain.on_policy_fraction + plain.teacher, 0.1)
    assert dataclasses.asdict(plain.training.settings(3))["seed"] == 3
