"""A plan from end to end, cut short and gone on with; and what a user can get wrong before any work."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress import Recipe, compress
from compress.artifact import Artifact
from compress.best import caches
from compress.best.__main__ import app
from compress.best.budgets import Budgets
from compress.best.folder import CANDIDATES
from compress.best.further import LEARNED, ROTATED, further
from compress.best.journal import Journal
from compress.best.question import Question
from compress.best.space import CACHE
from compress.best.start import make_plan
from compress.context import RunContext
from compress.errors import UserError
from compress.pipeline.inputs import open_inputs
from runtime import load
from runtime.checkpoints.open import open_checkpoint
from runtime.model.layers import weight_bytes

Tiny = Callable[..., Path]
SMALL: dict[str, Any] = {"samples": 4, "seq_len": 64, "eval_tokens": 1024, "new_tokens": 8, "threads": 1}


def question(model: Path, out: Path, **budgets: Any) -> Question:
    context = RunContext.of(Recipe.load("int8-dynamic"), model=str(model), out=out, baselines="none", **SMALL)
    return Question(context, Budgets(**budgets), wanted=2)


def test_folders_of_others_are_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no plan"):
        make_plan(question(tiny("llama"), tmp_path, kl=0.1), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_finished_plan_is_replaced_only_when_asked(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 2, "winner": "a", "candidates": []}))
    with pytest.raises(UserError, match="finished plan: replace it with --force"):
        make_plan(question(tiny("llama"), tmp_path, kl=0.1), force=False)


def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["--quality", "none", "--out", str(tmp_path / "plan")])
    assert found.exit_code == 2 and "--quality: expected a growth" in found.output
    assert not (tmp_path / "plan").exists()


@pytest.mark.slow
def test_first_tokens_are_judged_in_turns(tiny: Tiny, tmp_path: Path) -> None:
    asked = question(tiny("llama"), tmp_path / "plan", kl=0.3, ttft=1e-4)
    asked = replace(asked, prompt_tokens=100, wanted=1)
    with pytest.raises(UserError, match=r"the fastest took [0-9.e-]+ ms to the first token \(--ttft\), the original"):
        make_plan(asked, force=False)
    # What was measured is kept, and enough for a budget that can be kept.
    folder = make_plan(replace(asked, budgets=Budgets(kl=0.3, ttft=1e4)), force=False)
    plan = json.loads((folder / "plan.json").read_text())
    best = next(one for one in plan["candidates"] if one["key"] == plan["winner"])
    assert 1e-4 < best["measured"]["ttft_ms"] <= 1e4 and plan["original"]["ttft_ms"] > 0


@pytest.mark.slow
def test_keys_and_values_are_rounded_where_memory_asks_for_it(tiny: Tiny, tmp_path: Path) -> None:
    """A cache of 100,000 tokens outweighs a tiny model: only a smaller one fits."""
    model = tiny("llama")
    original = load(model)
    cache = caches.bytes_of(original, 100_000)
    asked = question(model, tmp_path / "plan", kl=0.3, memory=cache[1] + 2 * weight_bytes(original.decoder.parts))
    folder = make_plan(replace(asked, tokens=100_000, wanted=1), force=False)
    plan = json.loads((folder / "plan.json").read_text())
    best = next(one for one in plan["candidates"] if one["key"] == plan["winner"])
    assert plan["cache"] in ("int8 cache", "int4 cache") and best["choice"][CACHE] == plan["cache"]
    assert best["measured"]["memory"] <= asked.budgets.memory < cache[0]
    assert best["measured"]["disk"] == best["predicted"]["disk"]
    # What was measured is measured through that cache: the run's own report has a float32 one.
    report = json.loads((folder / "best/report.json").read_text())
    assert best["measured"]["kl"] != report["quality"]["kl_divergence"]["mean"]
    assert load(folder / "best/model").decoder.kv.kind == plan["cache"].removesuffix(" cache")


class KilledError(Exception):
    """As far as a killed process came."""


@pytest.mark.slow
def test_a_plan_that_was_cut_short_goes_on_to_the_same_bytes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan"
    asked = question(tiny("llama"), out, quality=0.05, disk=250_000)
    noted: list[str] = []
    note = Journal.note

    def killed(journal: Journal, **changed: Any) -> None:
        """Dies after each new figure once: what follows must start from the journal."""
        note(journal, **changed)
        what = "/".join(sorted(changed)) + str(len(journal.measured))
        if changed and what not in noted:
            noted.append(what)
            raise KilledError(what)

    monkeypatch.setattr(Journal, "note", killed)
    for _ in range(20):
        try:
            make_plan(asked, force=False)
            break
        except KilledError:
            continue
    assert len(noted) >= 6 and (out / "plan.md").is_file()
    ours = ["best", "learned.yaml", "plan.html", "plan.json", "plan.md"]
    assert sorted(path.name for path in out.iterdir() if path.name != "rotated.yaml") == ours
    plan = json.loads((out / "plan.json").read_text())
    best = next(one for one in plan["candidates"] if one["key"] == plan["winner"])
    assert best["measured"]["perplexity_growth_upper"] <= 0.05 and best["measured"]["disk"] <= 250_000
    assert best["measured"]["disk"] == best["predicted"]["disk"]
    # The recipe alone, with the text of the same length, gives the same weights.
    alone = compress(tiny("llama"), out / "best/recipe.yaml", tmp_path / "alone", **{**SMALL, "speed": False})
    ours = Artifact(out / "best").manifest["files"]
    assert {n: f for n, f in ours.items() if n.startswith("model/")} == {
        n: f for n, f in alone.manifest["files"].items() if n.startswith("model/")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "offered"), [("int4", ["learned"]), ("trellis-3", ["learned", "rotated"])])
def test_what_may_follow_is_a_recipe_that_runs(tiny: Tiny, tmp_path: Path, scheme: str, offered: list[str]) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    inputs = open_inputs(RunContext.of(Recipe.load("int8-dynamic"), model=str(model), out=tmp_path / "plan", **SMALL))
    layers = [{"scheme": scheme, "method": "gptq", "targets": ["down_proj"]}]
    stages = [{"quantize": {"method": "per-layer", "layers": layers}}]
    found = list(further(inputs, Recipe.model_validate({"name": "best", "stages": stages})))
    assert [one.file.removesuffix(".yaml") for one in found if one.text] == offered
    assert all(one.text or "integers" in one.why for one in found)
    for one in (one for one in found if one.text):
        (tmp_path / one.file).write_text(one.text)
        assert one.memory > 0 and one.seconds >= 0
        budget = {"tokens": 2048} if one.file == LEARNED else {}
        options = {**SMALL, **budget, "speed": False}
        run = compress(model, tmp_path / one.file, tmp_path / f"{one.file}.run", **options)
        own_head = "lm_head.weight" in open_checkpoint(run.model).names()
        assert own_head == (one.file == ROTATED) == (one.disk > 0)
    # A plan of a cache alone has no layers that a stage could train or turn.
    cache = Recipe.model_validate({"name": "best", "kv": {"scheme": "int8"}})
    assert all("no layer of the plan is packed" in one.why for one in further(inputs, cache) if one.file == LEARNED)


@pytest.mark.slow
def test_what_cannot_be_reached_ends_with_the_nearest_and_keeps_what_was_measured(tiny: Tiny, tmp_path: Path) -> None:
    asked = question(tiny("llama"), tmp_path / "plan", quality=0.0001, disk=10_000)
    with pytest.raises(UserError, match=r"reaches"):
        make_plan(asked, force=False)
    assert (tmp_path / "plan" / "journal.json").is_file()
    with pytest.raises(UserError, match="asked otherwise"):
        make_plan(replace(asked, tokens=99), force=False)
    assert CANDIDATES not in {path.name for path in (tmp_path / "plan").iterdir()}
