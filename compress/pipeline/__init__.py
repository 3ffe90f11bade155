"""A run from end to end: a model and a recipe become an artifact, then the report.

1. What the context names is opened and checked: models, text, the output folder (`inputs`, `artifact.workspace`).
2. What the stages will do to each tensor is planned, and what that takes is forecast (`forecast`).
3. Stages on blocks and stages that train make model/, then draft/, medusa/ and block/ (`passes`, `sequential`).
4. Exports are made of model/ (`exports`), checksums of all of it are written, and the report is made.
5. The partial folder takes its name.

Peak memory is the largest tensor outside the blocks plus one block and its quantised copy, and with calibration the
block's statistics.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from compress.artifact import STAGES, Artifact, manifest, safetensors, workspace
from compress.artifact.files import write_atomic
from compress.context import RunContext
from compress.export import serve
from compress.model.plan import make_plan
from compress.pipeline import exports, forecast, passes, rotated
from compress.pipeline.inputs import RunInputs, open_inputs
from compress.pipeline.needs import forecast_run
from compress.progress import silent, unsaid
from compress.recipe import Recipe
from compress.records import RunFacts
from compress.training.parallel import World, current, joined
from runtime.bench import digest
from runtime.devices import torch_threads

# What the manifest says of a stage that trains: no times, so that equal runs give equal bytes.
_UNTIMED = ("budget", "text", "steps", "tokens", "before", "best", "best_step", "perplexity", "acceptance", "made_of")

Report = Callable[[RunFacts, RunContext], object]


def compress(
    model: str | Path | None,
    recipe: str | Path | Recipe,
    out: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    report: Report | None = None,
    **options: Any,
) -> Artifact:
    """Compresses a model by a recipe and writes the artifact with its report.

    model    a directory with safetensors weights, or a hub name; None: the embedded pair.
    recipe   a Recipe, a built-in one's name, or a YAML file.
    out      the run folder, which must not hold anything (default: runs/<recipe>).
    draft    the model that drafts; None: the embedded pair's with the embedded pair, else none.
    report   makes the report of a finished artifact (default: compress.report.assemble.make_report).
    options  the other fields of `RunContext`, `samples=8` for one.

    Raises UserError (of any floor: compress.errors.USER_ERRORS) for what a user can get wrong; then nothing is left
    behind.
    """
    names = {"model": model, "draft": draft}
    options |= {name: None if value is None else str(value) for name, value in names.items()}
    return run(RunContext.of(Recipe.load(recipe), out=out, **options), report)


def run(context: RunContext, report: Report | None = None) -> Artifact:
    with joined() as world:
        if not world.leads:
            context = replace(context, progress=silent, note=unsaid)
        with torch_threads(context.threads):
            return _run(context, report, world)


def _run(context: RunContext, report: Report | None, world: World) -> Artifact:
    recipe, progress = context.recipe, context.progress
    # Only the first of several processes works in the folder.
    place = workspace.check(context.folder, context.resume, context.force) if world.leads else None
    if report is None:
        from compress.report.assemble import make_report

        report = make_report
    progress("check", 0, 1)
    inputs = open_inputs(context)
    passes.check_processes(recipe, world)
    rotation = rotated.check(inputs)
    # What is packed in the end is planned, and so checked, before any work, even where training comes first.
    # Pruned and healed weights have the original's names; of mixed precision, open still, every layer is int4.
    plan = make_plan(inputs.target.shapes(), inputs.structure, recipe.quantize, changed=recipe.changes)
    wanted = exports.wanted(recipe, context.export, plan)
    if place is None:
        passes.follow(inputs, world)
        return Artifact(context.folder)
    first = passes.first_stages(recipe)
    planned = None if first is None else passes.plan_pass(inputs.target, first, inputs)
    if planned is not None and not passes.weights_trained(recipe):
        plan = planned.plan
    progress("check", 1, 1)
    need = forecast_run(inputs, plan, planned, rotation)
    mapped = forecast.check(need, place.folder, context.memory_budget)
    context.note(need.line(mapped))
    samples = _samples(inputs, planned)
    versions = manifest.versions()
    with workspace.opened(place, _fingerprint(inputs, samples, versions)) as journal:
        if not journal.finished:
            # Before any work: a text that is too short is told at once.
            for text in inputs.training_texts.values():
                text.tokens(place.folder / STAGES, progress)
            made = passes.make_model(planned, inputs, journal, mapped)
            progress("write", 0, 1)
            passes.calibrate_cache(place.folder / "model", inputs)
            passes.make_companions(inputs, journal, made)
            facts = _record(inputs, place.folder, wanted, samples, versions, made)
            report(facts, context)
            # Last: its draft length is the report's.
            serve.write(place.folder)
        # Nothing more to train: the other processes leave.
        world.share(None)
        place.finish(journal)
    return Artifact(place.out)


def _samples(inputs: RunInputs, planned: passes.Pass | None) -> dict[str, int]:
    """Windows asked for and used: none are used where nothing of the artifact depends on the text.

    Rounding to nearest looks at no text, whatever was asked for; what trains reads a text of its own.
    """
    recipe = inputs.context.recipe
    measured = recipe.quantize is not None and recipe.quantize.method == "sensitivity"
    reads = planned is not None and planned.blocks is not None and planned.blocks.reads_text
    used = len(inputs.text.windows.calibration) if measured or recipe.kv is not None or reads else 0
    return {"samples_requested": inputs.context.samples, "samples_used": used}


def _record(
    inputs: RunInputs,
    folder: Path,
    wanted: tuple[str, ...],
    samples: dict[str, int],
    versions: dict[str, str],
    made: passes.ModelResult,
) -> RunFacts:
    """Makes the exports, writes recipe.yaml and the manifest, and says what the report is made of."""
    context, target, drafting = inputs.context, inputs.target, folder / "draft"
    write_atomic(folder / "recipe.yaml", context.recipe.to_yaml().encode())
    draft_name = None
    if drafting.is_dir():
        draft_name = inputs.draft.name if inputs.draft is not None else f"{target.name}-draft"
    about: dict[str, Any] = {
        "recipe": context.recipe.name,
        "model": target.name,
        "draft": draft_name,
        "seed": context.seed,
        "versions": versions,
        "calibration": samples,
        "logits": digest.entry(folder / "model", context.threads),
    }
    exported = exports.make(folder, wanted, context.progress)
    if exported:
        about["exports"] = list(exported)
    if made.reports:
        about["training"] = {
            kind: {key: report[key] for key in _UNTIMED if key in report} for kind, report in made.reports.items()
        }
    manifest.write(folder, about)
    context.progress("write", 1, 1)
    return RunFacts(
        model_name=target.name,
        draft_name=draft_name,
        original=target.path,
        folder=folder,
        model=folder / "model",
        draft=drafting if drafting.is_dir() else None,
        layers=made.layers,
        left_alone=made.left_alone,
        calibration=_calibration(inputs, samples, made),
        text=inputs.text,
        versions=versions,
        pruned=made.pruned,
        exports=exported,
    )


def _calibration(inputs: RunInputs, samples: dict[str, int], made: passes.ModelResult) -> dict[str, Any]:
    """The report's section; empty where no text was looked at."""
    trained = {"training": made.reports} if made.reports else {}
    if not samples["samples_used"]:
        return trained
    experts = [asdict(expert) for expert in made.experts]
    tokens = inputs.text.windows.calibration.numel()
    return {"source": inputs.text.corpus.name, **samples, "tokens": tokens, "experts": experts} | trained


def _fingerprint(inputs: RunInputs, samples: dict[str, int], versions: dict[str, str]) -> dict[str, Any]:
    """Everything that the journalled bytes depend on."""
    context, draft = inputs.context, inputs.draft
    tokens = hashlib.sha256(safetensors.raw(inputs.text.windows.calibration)).hexdigest()
    return {
        "recipe": {key: value for key, value in context.recipe.to_dict().items() if key not in ("about", "export")},
        "model": inputs.target.fingerprint(),
        "draft": None if draft is None else draft.fingerprint(),
        "versions": versions,
        "seed": context.seed,
        "shard_bytes": context.shard_bytes,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "calibration": samples | {"corpus": inputs.text.corpus.sha256, "tokens": tokens},
        "training": {str(index): text.text.sha256 for index, text in inputs.training_texts.items()},
    } | ({"device": context.device, "processes": current().size} if context.recipe.trains else {})
