"""How model/ comes to be: a pass over the original's blocks, then training, perhaps a second pass over the result.

no training              one pass, whose parts become model/
prune, heal              a pass that prunes, then training, whose result is model/
prune, heal, quantize    the same, then a second pass over what was healed
ternary, qat             training first, unless there is something to prune
quantize, learn          one pass, then training of what it has packed
rotate, …                the original in another basis first, which takes its place
"""

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from compress.artifact import STAGES
from compress.artifact import journal as journals
from compress.artifact.files import copy_synced, sync_folder
from compress.artifact.journal import Journal
from compress.calibration import shared
from compress.errors import UserError
from compress.model import directory
from compress.model.block_loader import BlockLoader
from compress.model.plan import Plan, check_shared, make_plan
from compress.model.source import Source
from compress.model.structure import read_structure
from compress.pipeline import rotated, sequential
from compress.pipeline.allocator import release
from compress.pipeline.inputs import RunInputs
from compress.pipeline.sequential import BlockPlan, BlockResults, plan_blocks
from compress.recipe import Recipe
from compress.recipe.block_stages import Experts
from compress.records import ExpertRecord, LayerRecord, LeftAlone
from compress.stages import kv_cache
from compress.stages.quantize import left_unfolded, make_stages, only_rounds
from compress.stages.sensitivity import choose_schemes
from compress.training import contract
from compress.training.contract import KINDS, StageContext
from compress.training.parallel import World, current
from compress.training.precision import has_bfloat16
from runtime.checkpoints.open import open_checkpoint
from runtime.devices import resolve

_SECOND = "second-pass"


@dataclass(frozen=True)
class Pass:
    """A pass over blocks that is planned: over which model, by which stages."""

    source: Source
    recipe: Recipe
    plan: Plan
    blocks: BlockPlan | None


@dataclass
class ModelResult:
    """What is known of model/ once it is there. `reports`: what each stage that trained says, by its kind."""

    layers: tuple[LayerRecord, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    experts: tuple[ExpertRecord, ...] = ()
    pruned: tuple[str, ...] = ()
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


def first_stages(recipe: Recipe) -> Recipe | None:
    """The stages of the first pass; None where training comes before anything else."""
    if not weights_trained(recipe):
        return recipe.only("prune", "smooth", "quantize")
    first = recipe.only("prune")
    return first if first.stages else None


def weights_trained(recipe: Recipe) -> list[int]:
    """Indices of the stages that train the model's own weights before it is packed."""
    return [i for i, stage in enumerate(recipe.stages) if stage.trained is not None and not _after(stage.kind)]


def plan_pass(source: Source, recipe: Recipe, inputs: RunInputs) -> Pass:
    """Plans a pass over the target or what became of it. Raises UserError for what no stage can do with this model."""
    # Stages that change no sizes leave the structure as it is.
    unchanged = source.checkpoint.config == inputs.target.checkpoint.config
    structure = inputs.structure if unchanged else read_structure(source.path)
    windows = inputs.text.windows.calibration
    plan = make_plan(source.shapes(), structure, recipe.quantize, changed=bool(recipe.prunes))
    if recipe.quantize is not None and recipe.quantize.method == "sensitivity":
        plan = choose_schemes(source.path, plan, structure, recipe.quantize, windows, inputs.context.progress)
    if only_rounds(recipe):
        return Pass(source, recipe, plan, None)
    check_shared(structure)
    loader = BlockLoader(source.checkpoint, structure)
    wished = recipe.quantize.experts if recipe.quantize is not None else None
    depth = next((stage.share for stage in recipe.prunes if stage.method == "depth"), None)
    stages = make_stages(recipe, plan, loader)
    if left_unfolded(recipe, kind := str(structure.text_config.model_type)):
        inputs.context.note(
            f"the structure of {kind} is not known, so its channels are not scaled for the trellis (docs/recipes.md)"
        )
    return Pass(source, recipe, plan, plan_blocks(loader, plan, stages, windows, wished or Experts(), depth))


def make_model(planned: Pass | None, inputs: RunInputs, journal: Journal, mapped: bool) -> ModelResult:
    """Makes `journal.folder`/model.

    planned  the first pass; None where training comes before anything else. mapped: activations stay in their file.
    """
    model = journal.folder / "model"
    # What a run that was killed in here has left is made again, as a whole.
    _clear(model)
    target = rotated.target(inputs, journal)
    made, out, trained = ModelResult(), target.path, weights_trained(inputs.context.recipe)
    if planned is not None:
        planned = planned if target is inputs.target else plan_pass(target, planned.recipe, inputs)
        plain = journal.folder / STAGES / "pruned"
        wanted: Path | None = model
        if trained:
            last = contract.place(journal.folder, trained[-1], inputs.context.recipe.stages[trained[-1]].kind)
            wanted = None if last.name in journal.stages else plain
        made = _known(planned.recipe, _run_pass(planned, inputs, journal, mapped, wanted))
        release()
        out = plain if plain.exists() else out
    if not trained:
        return _learn(made, inputs, journal, target.path)
    for index in trained:
        finished = _train(index, out, inputs, journal)
        out = finished.out
        _remember(made, inputs.context.recipe.stages[index].kind, finished.report)
    second = inputs.context.recipe.only("smooth", "quantize")
    if not second.stages:
        copy_folder(out, model)
        return made
    source = Source(inputs.target.name, open_checkpoint(out))
    planned = plan_pass(source, second, inputs)
    inner = _second_journal(journal)
    results = _run_pass(planned, inputs, inner, mapped, model)
    known = _known(second, results)
    made.layers, made.left_alone = known.layers, known.left_alone
    made.experts += known.experts
    made.pruned = results.linears if made.pruned else ()
    return _learn(made, inputs, journal, target.path)


def _learn(made: ModelResult, inputs: RunInputs, journal: Journal, unpacked: Path) -> ModelResult:
    """Trains what model/ is made of, where the recipe says so, and puts the result in its place.

    What is known of layers stays as it was when their codes were chosen, but for their outputs' errors: on the way to
    the original's answers a layer's own outputs may go further from what they were.
    """
    model = journal.folder / "model"
    for index, stage in enumerate(inputs.context.recipe.stages):
        if stage.learn is not None:
            finished = _train(index, model, inputs, journal, unpacked)
            _clear(model)
            copy_folder(finished.out, model)
            _remember(made, stage.kind, finished.report)
            made.layers = tuple(replace(layer, output_error=None) for layer in made.layers)
    return made


def check_processes(recipe: Recipe, world: World) -> None:
    """Raises UserError where several processes were started for a recipe that they cannot share."""
    if world.size == 1:
        return
    alone = [stage.kind for stage in recipe.stages if stage.trained is not None and not KINDS[stage.kind].parallel]
    if alone or not (recipe.trains or calibrates(recipe)):
        what = f"stage {alone[0]} works in one" if alone else f"recipe {recipe.name} neither trains nor calibrates"
        raise UserError(f"torchrun: expected one process, found {world.size}: {what}; start it with python -m")
    if calibrates(recipe):
        shared.require_equal(world)


def calibrates(recipe: Recipe) -> bool:
    """Whether text goes through blocks one after the other, which several processes can share."""
    return any(stage.trained is None for stage in recipe.stages) and not only_rounds(recipe)


def follow(inputs: RunInputs, world: World) -> None:
    """What processes besides the first do: calibrate and train with it, whenever it comes to that."""
    call: shared.Order | tuple[int, Path, Path | None, Path] | None
    while (call := world.share(None)) is not None:
        if isinstance(call, shared.Order):
            shared.follow(call, world)
            continue
        with tempfile.TemporaryDirectory() as folder:
            index, model, draft, texts = call
            context = _stage_context(index, model, draft, texts, Path(folder) / "work", inputs)
            contract.work(inputs.context.recipe.stages[index], context, Path(folder) / "out")


def make_companions(inputs: RunInputs, journal: Journal, made: ModelResult) -> None:
    """Makes draft/, medusa/ and block/ beside the finished model/: by their stages, or as the draft is."""
    folder = journal.folder
    recipe = inputs.context.recipe
    stages = {stage.kind: index for index, stage in enumerate(recipe.stages) if _beside(stage.kind)}
    results = {KINDS[kind].result for kind in stages}
    for name in {"draft", *results}:
        _clear(folder / name)
    if inputs.draft is not None and "draft" not in results:
        directory.copy_model(inputs.draft.path, folder / "draft", inputs.draft.weight_files)
    for kind, index in stages.items():
        finished = _train(index, folder / "model", inputs, journal)
        copy_folder(finished.out, folder / KINDS[kind].result)
        if (again := folder / KINDS[kind].result / "model").is_dir():
            _clear(folder / "model")
            again.rename(folder / "model")
        _remember(made, kind, finished.report)


def copy_folder(source: Path, target: Path) -> None:
    """Copies a folder's files, each of them whole and synced."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy_synced(path, place)
    sync_folder(target)


def _train(
    index: int, model: Path, inputs: RunInputs, journal: Journal, unpacked: Path | None = None
) -> contract.StageResult:
    stage, text = inputs.context.recipe.stages[index], inputs.training_texts[index]
    home = contract.place(journal.folder, index, stage.kind)
    if home.name in journal.stages:
        return contract.finished(home, journal)
    drafting = journal.folder / "draft"
    draft = drafting if drafting.is_dir() else inputs.draft.path if inputs.draft is not None else None
    texts = journal.folder / STAGES
    context = replace(_stage_context(index, model, draft, texts, home / "work", inputs), unpacked=unpacked)
    if _beside(stage.kind):
        context = replace(context, pack=partial(_pack, inputs, journal))
    current().share((index, model, draft, texts))
    return contract.run_stage(stage, home, journal, context, text.report())


def _stage_context(
    index: int, model: Path, draft: Path | None, texts: Path, work: Path, inputs: RunInputs
) -> StageContext:
    context, text = inputs.context, inputs.training_texts[index]
    trained = context.recipe.stages[index].trained
    assert trained is not None
    quick = has_bfloat16(str(resolve(context.device)))
    if trained.training.autocast == "auto" and not quick:
        context.note("this device has no instructions that multiply bfloat16, so training computes in float32")
    return StageContext(
        run=context,
        original=inputs.target.path,
        model=model,
        draft=draft,
        tokens=text.tokens(texts, context.progress),
        held_out=text.held_out,
        work=work,
        settings=trained.training.settings(context.seed, quick),
        budget=trained.training.budget(),
    )


def _pack(inputs: RunInputs, journal: Journal, plain: Path, out: Path) -> None:
    """Packs a plain directory with the original's architecture by the recipe's stages, as the original was packed."""
    recipe = inputs.context.recipe.only("smooth", "quantize")
    if not recipe.stages:
        copy_folder(plain, out)
    else:
        source = Source(inputs.target.name, open_checkpoint(plain))
        planned = plan_pass(source, recipe, inputs)
        folder = out.with_name(out.name + "-pass")
        _clear(folder)
        folder.mkdir()
        inner = journals.begin(folder, journal.fingerprint)
        _run_pass(planned, inputs, inner, mapped=False, out=out)
        _clear(folder)
    calibrate_cache(out, inputs)


def calibrate_cache(model: Path, inputs: RunInputs) -> None:
    """Calibrates the scales of keys and values on finished weights and puts them beside them, where the recipe says."""
    context = inputs.context
    if context.recipe.kv is None:
        return
    kv, windows = context.recipe.kv, inputs.text.windows.calibration
    told = partial(context.progress, "cache")
    found = kv_cache.calibrate(model, kv.scheme, windows, context.threads, told, kv.rotated)
    kv_cache.attach(model, found, context.shard_bytes)


def _remember(made: ModelResult, kind: str, report: dict[str, Any]) -> None:
    """Takes what a stage says; the layers that it has packed are the model's."""
    about = dict(report)
    layers, left = about.pop("layers", None), about.pop("left_alone", None)
    if layers is not None:
        made.layers = tuple(LayerRecord(**layer) for layer in layers)
    if left is not None:
        made.left_alone = tuple(LeftAlone(**entry) for entry in left)
    made.reports[kind] = about


def _known(recipe: Recipe, results: BlockResults) -> ModelResult:
    masked = any(prune.share is None for prune in recipe.prunes)
    return ModelResult(results.layers, results.plan.left_alone, results.experts, results.linears if masked else ())


def _run_pass(planned: Pass, inputs: RunInputs, journal: Journal, mapped: bool, out: Path | None) -> BlockResults:
    """Makes a pass's parts, and puts them together as the model directory `out` where one is wanted."""
    blocks, context = None if planned.blocks is None else replace(planned.blocks, mapped=mapped), inputs.context
    source = planned.source
    results = sequential.run(source.checkpoint, planned.plan, blocks, journal, context.progress, context.note)
    if out is not None:
        _clear(out)
        out.mkdir(parents=True)
        parts = [journal.folder / journal.parts[part]["file"] for part, _ in results.plan.parts]
        quantization = directory.quantization_config(results.plan, source.checkpoint.config)
        directory.join_model(parts, source.path, out, context.shard_bytes, quantization, results.config)
    return results


def _second_journal(journal: Journal) -> Journal:
    """The second pass's own journal: its parts go by the same names as the first one's."""
    folder = journal.folder / STAGES / _SECOND
    folder.mkdir(parents=True, exist_ok=True)
    begun = (folder / journals.NAME).exists()
    return journals.resume(folder, journal.fingerprint) if begun else journals.begin(folder, journal.fingerprint)


def _after(kind: str) -> bool:
    return kind in KINDS and KINDS[kind].after_packing


def _beside(kind: str) -> bool:
    """Whether the stage's result lies beside the packed model, and is none."""
    return _after(kind) and KINDS[kind].result != "model"


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
