"""The stage learn: what it trains, what it keeps, and that what is written is what was measured, in equal bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from compress.context import RunContext
from compress.errors import UserError
from compress.export import run as export
from compress.learn.convert import LearnedModel
from compress.learn.stage import LearnTask, run
from compress.logits import kl_rows, log_probabilities
from compress.pipeline import compress
from compress.recipe import Recipe
from compress.recipe.training import Budget, Settings
from compress.recipe.training_stages import Learn
from compress.records import RunFacts
from compress.report.training_words import training_findings
from compress.training import float_model
from compress.training.contract import StageContext
from runtime import load, native
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

Tiny = Callable[..., Path]
GRID = {"scheme": "int2", "group_size": 32, "method": "gptq", "search": True}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "int2": ("llama", GRID),
    "biases and zero points": ("qwen2", {**GRID, "scheme": "int3", "symmetric": False}),
    "trellis": ("llama", {"scheme": "trellis-2", "method": "gptq"}),
    "int8": ("llama", {"scheme": "int8-dynamic"}),
}


def text(count: int, seed: int) -> Tensor:
    return torch.randint(1, 300, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """(original, packed) of a name in STAGES."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            family, keys = STAGES[name]
            if keys["scheme"].startswith("trellis") and not native.usable("portable")[0]:
                pytest.skip(native.usable("portable")[1])
            recipe = Recipe.model_validate({"name": "own", "stages": [{"quantize": keys}]})
            out = tmp_path_factory.mktemp("packed") / "run"
            options: dict[str, Any] = {"samples": 2, "seq_len": 32, "report": lambda *_: None}
            made[name] = tiny(family), compress(tiny(family), recipe, out, **options).model
        return made[name]

    return get


def given(original: Path, model: Path, work: Path, steps: int, rate: float = 5e-3) -> StageContext:
    return StageContext(
        run=RunContext(Recipe.load("int4-learned")),
        original=original,
        model=model,
        draft=None,
        tokens=text(8_000, 0).numpy(),
        held_out=text(4 * 33, 1).view(4, 33),
        work=work,
        settings=Settings(learning_rate=rate, batch=4, length=32, evaluate_every=4, save_every=8),
        budget=Budget(tokens=steps * 4 * 32),
    )


def logits(folder: Path, tokens: Tensor) -> Tensor:
    """The runtime's logits at every position of one text."""
    decoder = load(folder).decoder
    cache = decoder.new_cache()
    return decoder.forward(tokens, Rows.chains([(cache.open(len(tokens)), 0, len(tokens))]), cache).logits


def held_out_kl(original: Path, model: Path, windows: Tensor) -> float:
    """KL divergence of a directory from the original, both through the kernels."""
    rows = [kl_rows(*(log_probabilities(logits(folder, w)) for folder in (original, model))) for w in windows]
    return float(torch.cat(rows).mean())


def size(folder: Path) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in open_checkpoint(folder).shards.values())


@pytest.mark.parametrize("name", ["int2", *(pytest.param(n, marks=pytest.mark.slow) for n in STAGES if n != "int2")])
def test_training_brings_the_model_nearer_in_equal_bytes(
    packed: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str
) -> None:
    original, model = packed(name)
    rate = 3e-4 if name == "int8" else 5e-3
    context = given(original, model, tmp_path / "work", 12, rate)
    report = run(Learn.model_validate({}), context, tmp_path / "model")
    before, after = report["held_out_kl"]["plain"], report["held_out_kl"]["kept"]
    assert report["kept"] == "learned" and after < before and report["best_step"] > 0
    # A trellis' sequences stay.
    assert (report["moved"] > 0) == (name != "trellis")
    # The directory is what was measured, through the kernels, and loads as the packed one did.
    assert held_out_kl(original, tmp_path / "model", context.held_out) == pytest.approx(after, rel=0.02)
    assert held_out_kl(original, model, context.held_out) == pytest.approx(before, rel=0.02)
    assert size(tmp_path / "model") == size(model)
    old, new = open_checkpoint(model), open_checkpoint(tmp_path / "model")
    assert old.names() == new.names() and old.config == new.config
    assert not torch.equal(old.tensor("model.norm.weight"), new.tensor("model.norm.weight"))
    same = "model.embed_tokens.weight"
    assert torch.equal(old.tensor(same), new.tensor(same))
    [said] = training_findings(json.loads(json.dumps({"learn": report})))
    assert f"{after:.5f}" in said and "NOT" not in said


def test_what_does_not_help_is_not_kept(packed: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    original, model = packed("int2")
    context = given(original, model, tmp_path / "work", 4, rate=10.0)
    lines: list[str] = []
    context = StageContext(**{**vars(context), "run": RunContext(Recipe.load("int4-learned"), note=lines.append)})
    report = run(Learn.model_validate({}), context, tmp_path / "model")
    assert report["kept"] == "plain" and report["moved"] == 0 and report["best_step"] == 0
    assert any("they are kept" in line for line in lines)
    old, new = open_checkpoint(model), open_checkpoint(tmp_path / "model")
    assert all(torch.equal(old.tensor(name), new.tensor(name)) for name in old.names())
    [said] = training_findings(json.loads(json.dumps({"learn": report})))
    assert "NOT" in said


def test_parts_that_have_no_rate_stay(packed: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    original, model = packed("int2")
    stage = Learn.model_validate({"rounding": False, "norms": 0})
    report = run(stage, given(original, model, tmp_path / "work", 8), tmp_path / "model")
    assert report["best_step"] > 0 and report["moved"] == 0
    old, new = open_checkpoint(model), open_checkpoint(tmp_path / "model")
    changed = {name for name in old.names() if not torch.equal(old.tensor(name), new.tensor(name))}
    assert changed and all(name.endswith("weight_scale") for name in changed)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(
    packed: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, model = packed("int2")
    stage, steps, losses = Learn.model_validate({}), 12, [0]
    run(stage, given(original, model, tmp_path / "one", steps), tmp_path / "whole")
    real = LearnTask.loss

    def dying(self: LearnTask, batch: Tensor, progress: float) -> Any:
        losses[0] += 1
        if losses[0] == 11:
            raise KeyboardInterrupt
        return real(self, batch, progress)

    monkeypatch.setattr(LearnTask, "loss", dying)
    with pytest.raises(KeyboardInterrupt):
        run(stage, given(original, model, tmp_path / "two", steps), tmp_path / "again")
    assert not (tmp_path / "again").exists()
    run(stage, given(original, model, tmp_path / "two", steps), tmp_path / "again")
    # Three steps were done again, those after the last checkpoint.
    assert losses[0] == 11 + steps - 8
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again"))
    assert one == other


def test_recomputed_activations_change_no_gradient(packed: Callable[[str], tuple[Path, Path]]) -> None:
    original, model = packed("int2")
    rows, found = text(4 * 33, 5).view(4, 33), []
    for checkpointing in (False, True):
        stage = Learn.model_validate({"gradient_checkpointing": checkpointing})
        learned = LearnedModel.load(model, original, stage, "cpu")
        task = LearnTask(learned, float_model.load(original), rows, stage)
        task.loss(rows, 0.5).value.backward()  # type: ignore[no-untyped-call]
        found.append([p.grad for group in task.groups() for p in group.parameters])
    assert len(found[0]) == 14 + 14 + 5
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def loaded_by_transformers(model: Path) -> dict[str, Tensor]:
    """The weights of the blocks' layers as compressed-tensors unpacks them."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=config)
    return {name: module.weight.detach() for name, module in theirs.named_modules() if name.endswith("_proj")}


@pytest.mark.parametrize(
    ("before", "name", "form"),
    [
        ([], "int4", "gptq"),
        ([], "int2", "compressed-tensors"),
        ([{"rotate": {}}], "int4", "gptq"),
        ([{"rotate": {}}], "int2", "compressed-tensors"),
    ],
)
def test_a_recipe_runs_it_and_its_exports_hold_the_same_codes(
    tiny: Tiny, tmp_path: Path, before: list[dict[str, Any]], name: str, form: str
) -> None:
    source = tmp_path / "code.txt"
    source.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    kept: list[RunFacts] = []

    def report(facts: RunFacts, context: RunContext) -> dict[str, Any]:
        kept.append(facts)
        return {}

    training = {"tokens": 512, "batch": 4, "length": 16, "save_every": 8, "evaluate_every": 8}
    quantize = {"scheme": name, "group_size": 32, "method": "gptq", "act_order": True}
    stages = [*before, {"quantize": quantize}, {"learn": {"training": training}}]
    recipe = Recipe.model_validate({"name": "own", "stages": stages})
    options: dict[str, Any] = {"calib": str(source), "seq_len": 32, "eval_tokens": 64, "samples": 2, "threads": 1}
    artifact = compress(tiny("llama"), recipe, tmp_path / "out", report=report, **options)
    artifact.verify()
    [facts] = kept
    assert len(facts.layers) == 14 and {layer.scheme for layer in facts.layers} == {name}
    learned = facts.calibration["training"]["learn"]
    assert learned["kept"] in ("learned", "plain")
    # What is learned is near the original, in whatever basis.
    assert 0 < learned["held_out_kl"]["plain"] < (0.5 if name == "int2" else 0.1)
    assert all(layer.output_error is None for layer in facts.layers)
    made = export(form, artifact.model, tmp_path / "export")
    assert not made.losses
    ours, theirs = open_checkpoint(artifact.model), open_checkpoint(tmp_path / "export")
    for layer in facts.layers:
        one, other = ours.weight(layer.name), theirs.weight(layer.name)
        assert isinstance(one, PackedWeight) and isinstance(other, PackedWeight)
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)
    if form == "compressed-tensors":
        found = loaded_by_transformers(tmp_path / "export")
        assert len(found) == 14
        for layer in facts.layers:
            assert torch.equal(found[layer.name], dequantize(ours.weight(layer.name))), layer.name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"learn": {}}], "a quantize stage before learn"),
        ([{"quantize": {"scheme": "nf4"}}, {"learn": {}}], "before learn, found nf4"),
        ([{"prune": {"method": "wanda", "pattern": "2:4"}}, {"quantize": GRID}, {"learn": {}}], "undo prune"),
        ([{"quantize": {"scheme": "int8-dynamic", "head": "int8"}}, {"learn": {}}], "head keep before learn"),
        ([{"smooth": {}}, {"quantize": {"scheme": "int8-dynamic"}}, {"learn": {}}], "undo smooth"),
        ([{"quantize": GRID}, {"learn": {"loss": {"jsd": 0}}}], "weight above 0"),
        ([{"quantize": GRID}, {"learn": {"reach": 0}}], "greater than or equal to 1"),
        ([{"quantize": GRID}, {"learn": {"speed": 1}}], "speed"),
        ([{"quantize": GRID}, {"learn": {}}, {"medusa": {"kind": "medusa-2"}}], "found learn"),
    ],
)
def test_what_cannot_be_learned_is_refused(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({"name": "own", "stages": stages})
    assert Recipe.model_validate({"name": "own", "stages": [{"quantize": GRID}, {"learn": {}}]}).trains


def test_other_codes_are_named(tiny: Tiny, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "own", "stages": [{"quantize": {"scheme": "nf4"}}]})
    made = compress(tiny("llama"), recipe, tmp_path / "run", samples=2, seq_len=32, report=lambda *_: None)
    with pytest.raises(UserError, match="found nf4"):
        LearnedModel.load(made.model, tiny("llama"), Learn.model_validate({}), "cpu")
