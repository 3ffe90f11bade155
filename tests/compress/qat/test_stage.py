"""The stages ternary and qat: conversion, training, and a packed directory that computes what was trained."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.context import RunContext
from compress.distill.objective import Objective
from compress.errors import UserError
from compress.model.plan import make_plan
from compress.model.structure import read_structure
from compress.pipeline import compress
from compress.qat.convert import (
    RoundedModel,
    convert,
    freeze_experts,
    rounded_layers,
    set_share,
)
from compress.qat.layers import BitLinear
from compress.qat.stage import RoundedTask, run
from compress.recipe import Recipe
from compress.recipe.training import Budget, Settings
from compress.recipe.training_stages import LossWeights, Qat, Ternary
from compress.records import RunFacts
from compress.training.contract import StageContext
from compress.training.float_model import held_out_loss
from compress.training.float_model import load as load_plain
from runtime import load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats.packed import PackedWeight

Tiny = Callable[..., Path]


def text(count: int, seed: int) -> Tensor:
    """Tokens with something to learn in them: each follows from the last one, mostly."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(1, 300, (count,), generator=generator)
    tokens = [1]
    for step in noise.tolist():
        tokens.append(step if step % 4 == 0 else (7 * tokens[-1] + 3) % 300 + 1)
    return torch.tensor(tokens[1:])


def given(folder: Path, work: Path, tokens: int) -> StageContext:
    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total and stage in ("ternary", "qat")

    return StageContext(
        run=RunContext(Recipe.load("ternary"), progress=progress),
        original=folder,
        model=folder,
        draft=None,
        tokens=text(20_000, 0).numpy(),
        held_out=text(8 * 33, 1).view(8, 33),
        work=work,
        settings=Settings(learning_rate=2e-3, batch=4, length=32, evaluate_every=4, save_every=8),
        budget=Budget(tokens=tokens),
    )


def logits(folder: Path, tokens: Tensor) -> Tensor:
    """The runtime's logits at every position of one text."""
    model = load(folder)
    cache = model.decoder.new_cache()
    handle = cache.open(len(tokens))
    return model.decoder.forward(tokens, Rows.chains([(handle, 0, len(tokens))]), cache).logits


@pytest.fixture
def eager() -> Iterator[None]:
    """transformers compiles its bitnet functions; run as they are written they need no compiler and no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def converted(folder: Path, stage: Ternary | Qat) -> RoundedModel:
    checkpoint, structure = open_checkpoint(folder), read_structure(folder)
    plan = make_plan({name: checkpoint.shape(name) for name in checkpoint.names()}, structure, stage.quantize())
    model = load_plain(folder)
    convert(model, plan, checkpoint, stage)
    return RoundedModel(model, checkpoint, structure, plan)


STAGES: dict[str, Ternary | Qat] = {
    "ternary": Ternary(),
    "ternary-1.25": Ternary(weights="ternary-1.25"),
    "binary": Ternary(weights="binary"),
    "int8": Qat(scheme="int8-dynamic"),
    "int4": Qat(scheme="int4", group_size=32),
    "int4-zeros": Qat(scheme="int4", group_size=64, symmetric=False),
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_packed_directory_computes_what_the_converted_model_does(
    tiny: Tiny, tmp_path: Path, kind: str, name: str
) -> None:
    trained = converted(tiny(kind), STAGES[name])
    records = trained.write(tmp_path / "model")
    tokens = text(40, 3)
    with torch.no_grad():
        expected = trained.model(input_ids=tokens[None]).logits[0]
        plain = load_plain(tiny(kind))(input_ids=tokens[None]).logits[0]
    found = logits(tmp_path / "model", tokens)
    error = float((found - expected).norm() / expected.norm())
    # What stays is float32's: another order of sums, and here and there an input's code that falls to the other side.
    assert error < 0.02 < float((plain - expected).norm() / expected.norm())
    assert len(records) == 14 and not list((tmp_path / "model").glob("part-*"))
    assert all(0 < record.error < 1.1 for record in records)
    if name in ("ternary", "binary"):
        assert all(8 * record.stored_bytes / record.weights < 2.01 for record in records)
    if name == "ternary-1.25":
        # 1.25, 16 bits an output and 16 bytes a layer; rows have 64 inputs and more.
        assert all(1.25 < 8 * record.stored_bytes / record.weights < 1.6 for record in records)


def test_transformers_loads_the_packed_model_and_agrees(tiny: Tiny, tmp_path: Path, eager: None) -> None:
    from transformers import AutoModelForCausalLM

    trained = converted(tiny("llama"), Ternary())
    trained.write(tmp_path / "model")
    assert (
        json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["quant_method"] == "bitnet"
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens = text(40, 3)
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
    found = logits(tmp_path / "model", tokens)
    assert float((found - expected).norm() / expected.norm()) < 0.01


def test_recipes_choose_layers_by_pattern(tiny: Tiny) -> None:
    trained = converted(tiny("llama"), Ternary(targets=("mlp", "q_proj"), ignore=("down",)))
    names = {name for name, module in trained.model.named_modules() if isinstance(module, BitLinear)}
    assert len(names) == 6 and all("up_proj" in n or "gate_proj" in n or "q_proj" in n for n in names)
    assert {"model.layers.0.mlp.down_proj", "lm_head"} <= set(trained.plan.skipped)
    with pytest.raises(UserError, match="matches no linear layer"):
        converted(tiny("llama"), Ternary(targets=("nothing",)))


def test_fused_experts_are_left_alone_and_named(tiny: Tiny, tmp_path: Path, eager: None) -> None:
    from transformers import AutoModelForCausalLM

    trained = converted(tiny("mixtral"), Ternary())
    left = {entry.layer: entry.why for entry in trained.plan.left_alone}
    assert any("experts" in layer and "bitnet leaves fused experts alone" in why for layer, why in left.items())
    frozen = freeze_experts(trained.model, trained.structure)
    assert frozen and all("experts" in name for name in frozen)
    assert len(list(rounded_layers(trained.model))) == 8
    trained.write(tmp_path / "model")
    tokens = text(20, 3)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = trained.model(input_ids=tokens[None]).logits[0]
        loaded = theirs(input_ids=tokens[None]).logits[0]
    for found in (logits(tmp_path / "model", tokens), loaded):
        assert float((found - expected).norm() / expected.norm()) < 0.02


def test_outputs_that_do_not_fill_bytes_are_left_alone(tiny: Tiny, tmp_path: Path, eager: None) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny("llama", intermediate_size=198)
    trained = converted(folder, Ternary())
    left = {entry.layer: entry.why for entry in trained.plan.left_alone}
    assert "198 outputs are no multiple of 4" in left["model.layers.*.mlp.up_proj.weight (2)"]
    trained.write(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens = text(20, 3)
    with torch.no_grad():
        expected = trained.model(input_ids=tokens[None]).logits[0]
        loaded = theirs(input_ids=tokens[None]).logits[0]
    assert float((loaded - expected).norm() / expected.norm()) < 0.02


def test_layers_that_are_no_linear_layers_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"no layer of this model can be quantised as ternary .*Conv1D"):
        converted(tiny("gpt2"), Ternary())


def test_training_brings_a_ruined_model_back(tiny: Tiny, tmp_path: Path) -> None:
    wanted = given(tiny("llama"), tmp_path / "work", 12_800)
    report = run(Ternary(loss=LossWeights(forward_kl=1, hidden_states=0.5), ramp=0.2), wanted, tmp_path / "model")
    perplexity = report["perplexity"]
    assert report["steps"] == 100 and not report["frozen"]
    assert math.exp(report["before"]) == pytest.approx(perplexity["rounded_without_training"], rel=1e-6)
    assert perplexity["trained"] < perplexity["rounded_without_training"]
    gap = math.log(perplexity["rounded_without_training"] / perplexity["original"])
    assert math.log(perplexity["trained"] / perplexity["original"]) < 0.5 * gap
    assert "without training" in report["warning"] and f"{perplexity['trained']:.2f}" in report["warning"]
    assert len(report["layers"]) == 14 and json.loads(json.dumps(report)) == report
    # The packed directory is the model that was measured.
    rows = wanted.held_out
    total = 0.0
    for row in rows:
        found = logits(tmp_path / "model", row).log_softmax(-1)
        total -= float(found[:-1].gather(1, row[1:, None]).sum())
    assert math.exp(total / (rows.shape[0] * 32)) == pytest.approx(perplexity["trained"], rel=2e-3)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_training_starts_at_fitted_codes_and_goes_on_to_the_same_bytes(tiny: Tiny, tmp_path: Path, codes: Any) -> None:
    more = {"scales": 2.0, "norms": 3.0} if codes == "ternary-1.25" else {}
    stage, folder = Ternary(weights=codes, fit_windows=16, **more), tiny("llama")
    report = run(stage, given(folder, tmp_path / "straight-work", 1536), tmp_path / "straight")
    perplexity = report["perplexity"]
    assert perplexity["trained"] <= perplexity["fitted_without_training"] < perplexity["rounded_without_training"]
    assert math.exp(report["before"]) == pytest.approx(perplexity["fitted_without_training"], rel=1e-6)
    packed = open_checkpoint(tmp_path / "straight").weight("model.layers.1.mlp.down_proj")
    assert isinstance(packed, PackedWeight)
    if codes == "ternary-1.25":
        assert bool(((packed.codes.unflatten(1, (-1, 4)) == 0).sum(-1) == 1).all())

    def stops(stage: str, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    stopped = given(folder, tmp_path / "work", 1536)
    with pytest.raises(KeyboardInterrupt):
        run(stage, replace(stopped, run=replace(stopped.run, progress=stops)), tmp_path / "resumed")
    notes: list[str] = []
    run(stage, replace(stopped, run=replace(stopped.run, note=notes.append)), tmp_path / "resumed")
    assert any("goes on after step 8 of 12" in note for note in notes)
    straight, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_more_windows_to_fit_to_than_there_are_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fit_windows: expected at most the 623 windows .*, found 624"):
        run(Ternary(fit_windows=624), given(tiny("llama"), tmp_path / "work", 512), tmp_path / "model")


@pytest.mark.parametrize("stage", [{"ternary": {}}, {"qat": {"scheme": "int8-dynamic"}}], ids=["ternary", "qat"])
def test_recipes_run_the_stages(tiny: Tiny, tmp_path: Path, stage: dict[str, Any]) -> None:
    source = tmp_path / "code.txt"
    source.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    kept: list[RunFacts] = []

    def report(facts: RunFacts, context: RunContext) -> dict[str, Any]:
        kept.append(facts)
        return {}

    [(kind, keys)] = stage.items()
    training = {"tokens": 512, "batch": 4, "length": 16, "save_every": 4, "evaluate_every": 4}
    recipe = Recipe.model_validate({"name": "own", "stages": [{kind: {**keys, "training": training}}]})
    options = {"calib": str(source), "seq_len": 32, "eval_tokens": 64, "samples": 2, "threads": 1}
    artifact = compress(tiny("llama"), recipe, tmp_path / "out", report=report, **options)
    artifact.verify()
    [facts] = kept
    assert len(facts.layers) == 14 and facts.left_alone
    assert {layer.scheme for layer in facts.layers} == {"ternary" if kind == "ternary" else "int8-dynamic"}
    assert "without training" in facts.calibration["training"][kind]["warning"]
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["training"][kind]["perplexity"].keys() == {"original", "rounded_without_training", "trained"}
    assert torch.isfinite(logits(artifact.model, text(20, 3))).all()


def test_training_by_the_text_alone_needs_no_original(tiny: Tiny, tmp_path: Path) -> None:
    wanted = given(tiny("llama"), tmp_path / "work", 6400)
    report = run(Qat(scheme="int2", group_size=32, loss=LossWeights(cross_entropy=1)), wanted, tmp_path / "model")
    assert report["perplexity"]["trained"] < report["perplexity"]["rounded_without_training"]
    assert "int2" in report["warning"]


MANNERS = [
    {"optimizer": "muon"},
    {"rest": 0.0},
    {"gradient_checkpointing": True},
    {"norms": 10.0},
    {"weights": "ternary-1.25", "scales": 3.0},
]


@pytest.mark.parametrize("changes", MANNERS)
def test_the_manner_of_training_is_free(tiny: Tiny, tmp_path: Path, changes: dict[str, Any]) -> None:
    stage = Ternary.model_validate(changes)
    wanted = given(tiny("llama"), tmp_path / "work", 2560)
    report = run(stage, wanted, tmp_path / "model")
    assert report["best"] < report["before"]
    kept = open_checkpoint(tmp_path / "model").tensor("model.norm.weight")
    same = torch.equal(kept, open_checkpoint(tiny("llama")).tensor("model.norm.weight"))
    assert same == (changes == {"rest": 0.0})


def test_every_parameter_is_trained_once_at_its_own_rate(tiny: Tiny) -> None:
    def rates(changes: dict[str, Any]) -> dict[str, float]:
        stage = Ternary.model_validate({"loss": {"cross_entropy": 1}, "weights": "ternary-1.25", **changes})
        model = converted(tiny("qwen2"), stage).model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = RoundedTask(model, None, text(33, 1)[None], stage).groups()
        found = [(names.pop(id(p)), group.rate_factor) for group in groups for p in group.parameters]
        assert not [name for name in names.values() if changes.get("rest") != 0]
        return dict(found)

    at = "model.layers.0.self_attn.q_proj."
    plain = rates({})
    assert set(plain.values()) == {1.0} and at + "gain" not in plain
    own = rates({"scales": 3, "norms": 5, "rest": 2})
    assert [own[at + part] for part in ("weight", "gain", "bias")] == [1, 3, 5]
    assert own["model.norm.weight"] == 5 and own["model.embed_tokens.weight"] == 2
    assert rates({"rest": 0, "norms": 5}).keys() == own.keys() - {
        name for name in own if name.endswith("gain") or own[name] == 2
    }


def test_recomputed_activations_change_no_gradient(tiny: Tiny) -> None:
    found = []
    for checkpointing in (False, True):
        trained = converted(tiny("llama"), Ternary())
        task = RoundedTask(
            trained.model,
            None,
            text(33, 1)[None],
            Ternary(loss=LossWeights(cross_entropy=1), gradient_checkpointing=checkpointing),
        )
        task.loss(text(4 * 33, 0).view(4, 33), 0.5).value.backward()
        found.append([layer.weight.grad for layer in rounded_layers(trained.model)])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def test_rounding_sets_in_along_the_ramp_but_is_always_measured_whole(tiny: Tiny) -> None:
    trained = converted(tiny("llama"), Ternary())
    model, rows = trained.model, text(33, 1)[None]
    task = RoundedTask(model, load_plain(tiny("llama")), rows, Ternary(ramp=0.5))

    def share(progress: float) -> float:
        task.loss(rows, progress)
        [found] = {layer.share for layer in rounded_layers(model) if isinstance(layer, BitLinear)}
        return found

    assert [share(p) for p in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]
    # Not rounded at all, the student is its teacher.
    assert float(task.loss(rows, 0.0).value.detach()) == pytest.approx(0, abs=1e-6)
    whole = task.evaluate()
    assert whole == held_out_loss(model, rows)
    set_share(model, 0.0)
    assert held_out_loss(model, rows) != pytest.approx(whole, abs=1e-3)


def test_losses_are_weighed_and_need_their_teacher(tiny: Tiny) -> None:
    trained, teacher, rows = converted(tiny("llama"), Ternary()), load_plain(tiny("llama")), text(33, 1)[None]
    stage = Ternary(loss=LossWeights(forward_kl=2.0, cross_entropy=0.5, hidden_states=3.0))
    loss = RoundedTask(trained.model, teacher, rows, stage).loss(rows, 0.0)
    parts = loss.parts
    assert set(parts) == {"forward_kl", "hidden_states", "cross_entropy"} and min(parts.values()) > 0
    expected = 2 * parts["forward_kl"] + 0.5 * parts["cross_entropy"] + 3 * parts["hidden_states"]
    assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="needs a teacher"):
        RoundedTask(trained.model, None, rows, stage).loss(rows, 0.0)
    with pytest.raises(ValueError, match="weights above 0"):
        Objective({})


def test_converted_layers_keep_their_parameters(tiny: Tiny) -> None:
    model = load_plain(tiny("qwen2"))
    before = dict(model.named_parameters())
    checkpoint, structure = open_checkpoint(tiny("qwen2")), read_structure(tiny("qwen2"))
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    convert(model, make_plan(shapes, structure, Ternary().quantize()), checkpoint, Ternary())
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert isinstance(model.lm_head, nn.Linear) and not isinstance(model.lm_head, BitLinear)


@pytest.mark.parametrize(
    ("stage", "data", "message"),
    [
        (Ternary, {"weights": "octal"}, "ternary"),
        (Ternary, {"ramp": 1.5}, "less than or equal to 1"),
        (Ternary, {"scales": 1.0}, "scales: expected 0 with ternary weights"),
        (Ternary, {"fit_windows": 64, "weights": "binary"}, "fit_windows: expected 0"),
        (Ternary, {"targets": ["("]}, "regular expressions"),
        (Ternary, {"loss": {"jsd": 0}}, "weight above 0"),
        (Ternary, {"speed": 1}, "speed"),
        (Qat, {}, "scheme"),
        (Qat, {"scheme": "nf4"}, "scheme"),
        (Qat, {"scheme": "int4", "group_size": 100}, "group_size"),
        (Qat, {"scheme": "int8-dynamic", "group_size": 32}, "group_size"),
        (Qat, {"scheme": "int8-dynamic", "symmetric": False}, "symmetric"),
    ],
)
def test_wrong_keys_are_refused(stage: type[Ternary] | type[Qat], data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        stage.model_validate(data)
