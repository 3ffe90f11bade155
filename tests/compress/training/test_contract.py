"""Stages that train, through the pipeline: healing, a second pass, resuming inside training, what is told of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.artifact import Artifact
from compress.artifact import journal as journals
from compress.context import RunContext
from compress.distill import cached_logits, objective
from compress.distill.objective import objective_loss
from compress.errors import USER_ERRORS, UserError
from compress.pipeline import compress
from compress.progress import Note, Progress, silent, unsaid
from compress.recipe import Recipe
from compress.records import RunFacts
from compress.report.training_words import training_findings
from compress.training.contract import Loss

Tiny = Callable[..., Path]
Go = Callable[..., tuple[Artifact, RunFacts]]

TRAINING = {"tokens": 4 * 4 * 16, "batch": 4, "length": 16, "learning_rate": 1e-2, "save_every": 2, "evaluate_every": 2}
HEAL = {"heal": {"training": TRAINING}}
DEPTH = {"prune": {"method": "depth", "share": 0.3}}
WIDTH = {"prune": {"method": "width", "share": 0.3}}
WANDA = {"prune": {"method": "wanda", "sparsity": 0.5}}
INT4 = {"quantize": {"scheme": "int4", "group_size": 32}}


@pytest.fixture
def go(tmp_path: Path) -> Go:
    """`go(model, stages, **options)` runs stages with a fake report."""
    text = tmp_path / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))

    def run_it(
        model: Path,
        stages: list[dict[str, Any]],
        out: str = "out",
        progress: Progress = silent,
        note: Note = unsaid,
        **options: Any,
    ) -> tuple[Artifact, RunFacts]:
        kept: list[RunFacts] = []

        def report(facts: RunFacts, context: RunContext) -> dict[str, Any]:
            kept.append(facts)
            return {}

        recipe = Recipe.model_validate({"name": "own", "stages": stages})
        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 2, "threads": 1} | options
        made = compress(model, recipe, tmp_path / out, report=report, progress=progress, note=note, **small)
        return made, kept[0]

    return run_it


def told(facts: RunFacts, kind: str = "heal") -> dict[str, Any]:
    found: dict[str, Any] = facts.calibration["training"][kind]
    return found


def content(artifact: Artifact) -> dict[str, bytes]:
    return {
        path.relative_to(artifact.path).as_posix(): path.read_bytes()
        for path in sorted(artifact.path.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("prune", [DEPTH, WIDTH], ids=["depth", "width"])
def test_healing_changes_weights_and_says_what_it_did(tiny: Tiny, go: Go, prune: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    pruned, _ = go(tiny("llama"), [prune], out="pruned")
    artifact, facts = go(tiny("llama"), [prune, HEAL])
    found = told(facts)
    assert (found["steps"], found["tokens"], found["budget"]) == (4, 256, {"tokens": 256})
    assert found["best"] < found["before"]
    assert found["perplexity"]["healed"] < found["perplexity"]["pruned"]
    assert found["curve"][0]["held_out"] == found["before"]
    [said] = training_findings(facts.calibration["training"])
    assert f"to {found['perplexity']['healed']:.2f}, which wins back" in said
    assert found["text"]["held_out_tokens"] > 0
    before, after = (load_file(one.model / "model.safetensors") for one in (pruned, artifact))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: tensor.shape for n, tensor in after.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(artifact.model)
    artifact.verify()
    # Nothing of the work is left, and the manifest has no times.
    assert {path.name for path in artifact.path.iterdir()} == {
        "model",
        "recipe.yaml",
        "manifest.json",
        "SERVE.md",
        "serve",
    }
    kept = artifact.manifest["training"]["heal"]
    assert kept["steps"] == 4 and "seconds" not in json.dumps(kept) and "seconds" in found


def test_pruned_weights_stay_zeros(tiny: Tiny, go: Go) -> None:
    artifact, facts = go(tiny("llama"), [WANDA, HEAL])
    weight = load_file(artifact.model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert told(facts)["perplexity"]["healed"] < told(facts)["perplexity"]["pruned"]
    assert "model.layers.0.mlp.up_proj" in facts.pruned
    with pytest.raises(UserError, match="expected adamw where single weights are pruned"):
        go(tiny("llama"), [WANDA, {"heal": {"training": TRAINING, "optimizer": "muon"}}], out="muon")


def test_what_was_healed_is_quantised(tiny: Tiny, go: Go) -> None:
    """The second pass rounds the healed weights, not the pruned ones."""
    from compress.quantize import rtn
    from runtime.checkpoints.open import open_checkpoint

    healed, _ = go(tiny("llama"), [DEPTH, HEAL], out="healed")
    artifact, facts = go(tiny("llama"), [DEPTH, HEAL, INT4])
    assert len(facts.layers) == 7 and {layer.scheme for layer in facts.layers} == {"int4"}
    weight = load_file(healed.model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    packed = open_checkpoint(artifact.model).weight("model.layers.0.mlp.up_proj")
    assert torch.equal(packed.codes, rtn.quantize(weight, "int4", 32).codes)  # type: ignore[union-attr]
    assert told(facts)["steps"] == 4


def test_what_was_healed_and_packed_is_exported(tiny: Tiny, go: Go) -> None:
    """The export is checked against what the second pass packs: the first one packs nothing."""
    from runtime.checkpoints.open import open_checkpoint

    artifact, facts = go(tiny("llama"), [WANDA, HEAL, INT4], export=("gptq",))
    [entry] = facts.exports
    assert entry["name"] == "gptq" and entry["repacked"] == 14
    path = "model.layers.0.mlp.up_proj"
    exported, packed = (open_checkpoint(artifact.path / at).weight(path) for at in ("exports/gptq", "model"))
    assert torch.equal(exported.codes, packed.codes)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="export bitsandbytes"):
        go(tiny("llama"), [WANDA, HEAL, {"quantize": {"scheme": "fp8"}}], out="refused", export=("bitsandbytes",))


def test_calibrated_stages_follow_healing(tiny: Tiny, go: Go) -> None:
    gptq = {"quantize": {"scheme": "int4", "group_size": 32, "method": "gptq"}}
    _, facts = go(tiny("llama"), [WIDTH, HEAL, gptq])
    assert all(layer.output_error is not None for layer in facts.layers)


class StopAt:
    """Progress that raises the n-th time that a stage reports."""

    def __init__(self, stage: str, number: int):
        self.stage, self.left = stage, number

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == self.stage:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@pytest.mark.parametrize(("stage", "number"), [("heal", 4), ("write", 1), ("quantize", 9)])
def test_resuming_gives_the_same_bytes(tiny: Tiny, go: Go, tmp_path: Path, stage: str, number: int) -> None:
    stages = [DEPTH, HEAL, INT4]
    straight, _ = go(tiny("llama"), stages, out="straight")
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), stages, progress=StopAt(stage, number))
    partial = tmp_path / "out.partial"
    assert (partial / "stages/01-heal/work/training.json").exists() == (stage == "heal")
    assert bool(json.loads((partial / journals.NAME).read_text())["body"]["stages"]) == (stage != "heal")
    notes: list[str] = []
    resumed, facts = go(tiny("llama"), stages, resume=True, note=notes.append)
    assert content(resumed) == content(straight)
    assert told(facts)["steps"] == 4
    assert any("training goes on after step 2 of 4" in note for note in notes) == (stage == "heal")


KEPT = {"heal": {"training": TRAINING, "answers": {"windows": 6, "top": 8}}}


@pytest.mark.parametrize(("stage", "number"), [("teacher", 1), ("heal", 4)])
def test_kept_answers_teach_and_survive_a_stop(
    tiny: Tiny, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, number: int
) -> None:
    straight, facts = go(tiny("llama"), [DEPTH, KEPT], out="straight")
    assert told(facts)["steps"] == 4 and told(facts)["perplexity"]["healed"] < told(facts)["perplexity"]["pruned"]
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), [DEPTH, KEPT], progress=StopAt(stage, number))
    answers = tmp_path / "out.partial/stages/01-heal/work/answers"
    assert answers.exists() == (stage == "heal")
    if stage == "heal":
        # What is there is not written a second time.
        monkeypatch.setattr(cached_logits, "write", None)
    resumed, _ = go(tiny("llama"), [DEPTH, KEPT], resume=True)
    assert content(resumed) == content(straight)


def test_ternary_weights_learn_from_kept_answers(tiny: Tiny, go: Go) -> None:
    training = TRAINING | {"tokens": 40 * 4 * 16, "evaluate_every": 10, "save_every": 40}
    _, facts = go(tiny("llama"), [{"ternary": {"training": training, "answers": {"windows": 8, "top": 300}}}])
    losses = [point["loss"] for point in told(facts, "ternary")["curve"] if point.get("loss")]
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"windows": 100_000}, "answers.windows: expected at most"),
        ({"windows": 4, "top": 320}, "answers.top: expected"),
    ],
)
def test_answers_that_cannot_be_kept(tiny: Tiny, go: Go, answers: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        go(tiny("llama"), [DEPTH, {"heal": {"training": TRAINING, "answers": answers}}])


def test_another_budget_does_not_resume(tiny: Tiny, go: Go) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), [DEPTH, HEAL], progress=StopAt("heal", 4))
    with pytest.raises(UserError, match=r"heal\.training\.tokens was 256 and is 512"):
        go(tiny("llama"), [DEPTH, HEAL], tokens=512, resume=True)
    _, facts = go(tiny("llama"), [DEPTH, HEAL], tokens=512, force=True)
    assert told(facts)["steps"] == 8


def test_a_finished_stage_that_was_changed_is_refused(tiny: Tiny, go: Go, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tiny("llama"), [DEPTH, HEAL], progress=StopAt("write", 1))
    [weights] = (tmp_path / "out.partial/stages/01-heal/out").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"01-heal/out/model\.safetensors is not what the journal says"):
        go(tiny("llama"), [DEPTH, HEAL], resume=True)


def test_a_failed_training_keeps_its_checkpoint(
    tiny: Tiny, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def broken(weights: Any, student: Any, teacher: Any, batch: Tensor) -> Loss:
        nonlocal calls
        calls += 1
        found = objective_loss(weights, student, teacher, batch)
        return Loss(found.value * float("nan")) if calls == 4 else found

    with monkeypatch.context() as patch, pytest.raises(UserError, match="found none at step 4") as caught:
        patch.setattr(objective, "objective_loss", broken)
        go(tiny("llama"), [DEPTH, HEAL])
    assert "out.partial is kept for --resume" in caught.value.__notes__
    assert json.loads((tmp_path / "out.partial/stages/01-heal/work/training.json").read_text())["body"]["best"]
    _, facts = go(tiny("llama"), [DEPTH, HEAL], resume=True)
    assert told(facts)["steps"] == 4


def test_a_text_that_is_too_short_leaves_nothing_behind(tiny: Tiny, go: Go, tmp_path: Path) -> None:
    short = {"heal": {"training": {**TRAINING, "length": 100_000}}}
    with pytest.raises(USER_ERRORS, match="too short to train on: it has"):
        go(tiny("llama"), [DEPTH, short])
    assert [path.name for path in tmp_path.iterdir()] == ["code.txt"]


def test_budgets_on_the_command_line_are_checked(tiny: Tiny, go: Go) -> None:
    with pytest.raises(UserError, match="expected one budget, found both"):
        go(tiny("llama"), [DEPTH, HEAL], tokens=512, minutes=1.0)
    with pytest.raises(UserError, match=r"--minutes: expected 0\.001 or more, found -1"):
        go(tiny("llama"), [DEPTH, HEAL], minutes=-1.0)
    with pytest.raises(UserError, match="has no stage that trains"):
        go(tiny("llama"), [DEPTH], minutes=1.0)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mixtral", "phi3"])
def test_other_architectures_heal(tiny: Tiny, go: Go, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    # A random model's answers are no better than chance, so it is the text that teaches.
    gentle = {
        "heal": {"training": {**TRAINING, "learning_rate": 1e-3}, "loss": {"forward_kl": 1.0, "cross_entropy": 1.0}}
    }
    artifact, facts = go(tiny(kind), [WANDA, gentle])
    assert told(facts)["perplexity"]["healed"] < told(facts)["perplexity"]["pruned"]
    # transformers fuses experts that lie one by one in the file: they stay as they were pruned.
    frozen = told(facts)["frozen"]
    assert all(".experts." in name for name in frozen) and bool(frozen) == (kind == "mixtral")
    AutoModelForCausalLM.from_pretrained(artifact.model)


@pytest.mark.slow
def test_torchrun_heals_like_one_process(tiny: Tiny, go: Go, tmp_path: Path) -> None:
    """The whole command in two processes: one artifact, the same losses within rounding."""
    _, straight = go(tiny("llama"), [DEPTH, HEAL])
    recipe = tmp_path / "own.yaml"
    recipe.write_text(json.dumps({"stages": [DEPTH, HEAL]}))

    def launch(name: str, recipe: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words += ["-m", "compress.run", "--recipe", str(recipe), "--model", str(tiny("llama")), "--threads", "1"]
        words += ["--out", str(tmp_path / name), "--calib", str(tmp_path / "code.txt"), "--seq-len", "32"]
        words += ["--eval-tokens", "64", "--samples", "2", "--no-speed"]
        return subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[3])

    done = launch("two", recipe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    found = Artifact(tmp_path / "two").report["calibration"]["training"]["heal"]
    losses = [[point.get("held_out") for point in one["curve"]] for one in (found, told(straight))]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    recipe.write_text(json.dumps({"stages": [INT4]}))
    refused = launch("three", recipe)
    assert refused.returncode != 0 and "has no stage that trains; start it with python -m" in refused.stderr
