"""A run from end to end: a model and a recipe become an artifact, then the report.

Peak memory is the largest tensor outside the blocks plus one block and its quantised copy, and with calibration the
block's statistics.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.artifact import Artifact, manifest, safetensors, workspace
from compress.artifact.files import write_atomic
from compress.errors import UserError
from compress.export import serve
from compress.model.plan import Plan, make_plan
from compress.model.source import Source, open_sources
from compress.model.structure import Survey, survey
from compress.pipeline import exports as record
from compress.pipeline import forecast, forecast_training, passes
from compress.pipeline.options import Options, check_ranges
from compress.pipeline.sequential import Note, Progress
from compress.recipe import KeyValue, Recipe
from compress.recipe.training import Budget
from compress.records import ReportOptions, RunFacts
from compress.training import contract
from compress.training.parallel import World, current, joined

if TYPE_CHECKING:
    from calib.corpora import Corpus
    from calib.windows import Windows
    from compress.training.data import StageText

Report = Callable[[RunFacts, ReportOptions, Progress], dict[str, Any]]


def silent(stage: str, done: int, total: int) -> None:
    """Progress for those who do not want to see any."""


def unsaid(line: str) -> None:
    """Notes for those who do not want to read any."""


def compress(
    model: str | Path | None,
    recipe: str | Path | Recipe,
    out: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    progress: Progress = silent,
    **options: Any,
) -> Artifact:
    """Compresses a model by a recipe and writes the artifact with its report.

    model    a directory with safetensors weights, or a hub name; None: the embedded pair.
    recipe   a Recipe, a built-in one's name, or a YAML file.
    out      the run folder, which must not hold anything (default: runs/<recipe>).
    draft    the model that drafts; None: the embedded pair's with the embedded pair, else none.
    options  the other fields of `Options`, `samples=8` for one.

    Raises UserError (of any floor: compress.errors.USER_ERRORS) for what a user can get wrong; then nothing is left
    behind.
    """
    known = {field.name for field in fields(Options)} - {"draft"}
    for name in options:
        if name not in known:
            raise UserError(f"option {name!r} is unknown: expected one of {', '.join(sorted(known))}")
    chosen = Options(draft=None if draft is None else str(draft), **options)
    return run(None if model is None else str(model), Recipe.load(recipe), out, chosen, progress)


def run(
    model: str | None,
    recipe: Recipe,
    out: str | Path | None,
    options: Options,
    progress: Progress = silent,
    report: Report | None = None,
    command: str | None = None,
    note: Note = unsaid,
) -> Artifact:
    """See `compress`.

    report   makes the report (default: report.assemble); command: what it shows to reproduce.
    note     is given lines for people: the forecast, and what each block came to.
    """
    check_ranges(options)
    with joined() as world:
        if not world.leads:
            progress, note = silent, unsaid
        with _threads(options.threads):
            return _run(model, recipe, out, options, progress, report, command, note, world)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Within, torch computes on so many threads; a caller's own count is as it was afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    model: str | None,
    recipe: Recipe,
    out: str | Path | None,
    options: Options,
    progress: Progress,
    report: Report | None,
    command: str | None,
    note: Note,
    world: World,
) -> Artifact:
    wanted = Path(out if out is not None else f"runs/{recipe.name}")
    # Only the first of several processes works in the folder.
    place = workspace.check(wanted, options.resume, options.force) if world.leads else None
    if report is None:
        from compress.report.assemble import make_report

        report = make_report
    progress("check", 0, 1)
    if options.minutes is not None or options.tokens is not None:
        recipe = recipe.with_budget(Budget(options.tokens, options.minutes))
    target, draft = open_sources(model, options.draft)
    structure = survey(target.path)
    # A walk over the original is planned, and so checked, before any work.
    first = passes.first_stages(recipe)
    packing = recipe if first is None else first
    plan = make_plan(target.shapes(), structure, packing.quantize, changed=recipe.changes)
    exports = record.wanted(recipe, options.export, plan)
    if recipe.kv is not None:
        from compress.stages import kv_cache

        kv_cache.check(target.checkpoint.config)
    settings = _settings(recipe, options)
    corpus, windows = _text(target, settings, options.seed)
    texts = _texts(recipe, target, settings, corpus, windows, options.seed)
    around = passes.Surroundings(
        target,
        draft,
        recipe,
        windows,
        texts,
        options.device,
        options.threads,
        options.seed,
        options.shard_bytes,
        progress,
        note,
    )
    passes.check_processes(recipe, world)
    if place is None:
        passes.follow(around, world)
        return Artifact(wanted)
    planned = None if first is None else passes.plan_pass(target, first, structure, windows, progress)
    versions = manifest.versions()
    progress("check", 1, 1)
    mapped = _preflight(target, draft, recipe, structure, plan, planned, place.folder, options.memory_budget, note)
    samples = _samples(settings, windows, _looks_at_text(recipe, planned))
    fingerprint = _fingerprint(recipe, target, draft, versions, options) | {
        "calibration": samples | {"corpus": corpus.sha256, "tokens": _digest(windows)},
        "training": {str(index): text.text.sha256 for index, text in texts.items()},
    }
    with workspace.opened(place, fingerprint) as journal:
        if not journal.finished:
            passes.read_texts(around, place.folder)
            made = passes.make_model(planned, around, journal, mapped)
            progress("write", 0, 1)
            if recipe.kv is not None:
                _calibrate_cache(place.folder / "model", recipe.kv, windows, options, progress)
            passes.make_companions(around, journal, made)
            write_atomic(place.folder / "recipe.yaml", recipe.to_yaml().encode())
            names = {"model": target.name, "draft": _draft_name(target, draft, place.folder)}
            about: dict[str, Any] = {
                "recipe": recipe.name,
                **names,
                "seed": options.seed,
                "versions": versions,
                "calibration": samples,
            }
            exported = record.make(place.folder, exports, progress)
            if exported:
                about["exports"] = list(exported)
            if made.told:
                about["training"] = {kind: contract.for_manifest(told) for kind, told in made.told.items()}
            manifest.write(place.folder, about)
            progress("write", 1, 1)
            drafting = place.folder / "draft"
            facts = RunFacts(
                recipe=recipe.to_dict(),
                model_name=target.name,
                draft_name=names["draft"],
                original=target.path,
                folder=place.folder,
                model=place.folder / "model",
                draft=drafting if drafting.is_dir() else None,
                layers=made.layers,
                left_alone=made.left_alone,
                calibration=_calibration(samples, corpus, windows, made),
                command=command or f"python -m compress.run --recipe {recipe.name}",
                seed=options.seed,
                versions=versions,
                pruned=made.pruned,
                exports=exported,
            )
            report(facts, settings, progress)
            # Last: its draft length is the report's.
            serve.write(place.folder)
        # Nothing more to train: the other processes leave.
        world.share(None)
        place.finish(journal)
    return Artifact(place.out)


def _settings(recipe: Recipe, options: Options) -> ReportOptions:
    """How the report measures: the command's options over the recipe's over the defaults."""
    default, wished = ReportOptions(), recipe.calibration
    return ReportOptions(
        text=options.calib if options.calib is not None else wished.source,
        samples=options.samples or wished.samples or default.samples,
        seq_len=options.seq_len or wished.seq_len or default.seq_len,
        eval_tokens=options.eval_tokens,
        new_tokens=options.new_tokens,
        draft_length=options.draft_length,
        speed=options.speed,
        device=options.device,
        threads=options.threads,
    )


def _text(target: Source, settings: ReportOptions, seed: int) -> "tuple[Corpus, Windows]":
    """The corpus and the windows that the report will draw too, so that text that is too short stops the run first."""
    from calib import corpora
    from calib.windows import make_windows

    corpus = corpora.load(settings.text)
    windows = make_windows(
        corpus,
        target.tokenizer,
        length=min(settings.seq_len, target.max_positions),
        calibration=settings.samples,
        evaluation_tokens=settings.eval_tokens,
        seed=seed,
        separator=target.tokenizer.eos_token_id,
    )
    return corpus, windows


def _texts(
    recipe: Recipe, target: Source, settings: ReportOptions, corpus: "Corpus", windows: "Windows", seed: int
) -> "dict[int, StageText]":
    """What the recipe's stages train on, by their index; nothing is read where none trains."""
    if not recipe.trains:
        return {}
    from calib.training_text import Measured
    from compress.training import data

    measured = Measured(
        source=settings.text,
        corpus=corpus,
        tokenizer=target.tokenizer,
        length=windows.length,
        calibration=settings.samples,
        evaluation_tokens=settings.eval_tokens,
        seed=seed,
        separator=target.tokenizer.eos_token_id,
    )
    return data.gather(recipe, measured)


def _preflight(
    target: Source,
    draft: Source | None,
    recipe: Recipe,
    structure: Survey,
    plan: Plan,
    planned: passes.Pass | None,
    folder: Path,
    budget: int | None,
    note: Note,
) -> bool:
    """Forecasts what the run will take; whether activations are to stay in their file.

    Raises UserError where it cannot fit.
    """
    copied = 0 if draft is None else sum(file.stat().st_size for file in draft.weight_files)
    need = forecast.forecast(
        target.shapes(), target.item_sizes(), plan, None if planned is None else planned.work, copied
    )
    drafts = None if draft is None else draft.shapes()
    sizes = forecast_training.Sizes.of(target.shapes(), target.item_sizes(), plan, structure, drafts)
    need = forecast_training.with_training(need, recipe, sizes)
    mapped = forecast.check(need, folder, budget)
    note(need.line(mapped))
    return mapped


def _looks_at_text(recipe: Recipe, planned: passes.Pass | None) -> bool:
    """Whether anything of the artifact depends on the calibration text; what trains reads a text of its own."""
    measured = recipe.quantize is not None and recipe.quantize.method == "sensitivity"
    walks = planned is not None and planned.work is not None and planned.work.looks_at_text
    return measured or recipe.kv is not None or walks


def _draft_name(target: Source, draft: Source | None, folder: Path) -> str | None:
    if not (folder / "draft").is_dir():
        return None
    return draft.name if draft is not None else f"{target.name}-draft"


def _calibrate_cache(model: Path, wished: KeyValue, windows: "Windows", options: Options, progress: Progress) -> None:
    """Calibrates the scales of keys and values on the finished weights, and puts them beside them."""
    from compress.stages import kv_cache

    def told(done: int, total: int) -> None:
        progress("cache", done, total)

    found = kv_cache.calibrate(model, wished.scheme, windows.calibration, options.threads, told)
    kv_cache.attach(model, found, options.shard_bytes)


def _samples(settings: ReportOptions, windows: "Windows", used_at_all: bool) -> dict[str, int]:
    """Windows asked for and used: rounding to nearest looks at no text, whatever was asked for."""
    used = windows.calibration_used if used_at_all else 0
    return {"samples_requested": settings.samples, "samples_used": used}


def _calibration(samples: dict[str, int], corpus: "Corpus", windows: "Windows", made: passes.Made) -> dict[str, Any]:
    """The report's section; empty where no text was looked at."""
    trained = {"training": made.told} if made.told else {}
    if not samples["samples_used"]:
        return trained
    experts = [asdict(expert) for expert in made.experts]
    found = {"source": corpus.name, **samples, "tokens": windows.calibration_tokens, "experts": experts}
    return found | trained


def _digest(windows: "Windows") -> str:
    """SHA-256 of the calibration tokens."""
    return hashlib.sha256(safetensors.raw(windows.calibration)).hexdigest()


def _fingerprint(
    recipe: Recipe, target: Source, draft: Source | None, versions: dict[str, str], options: Options
) -> dict[str, Any]:
    """Everything that the journalled bytes depend on."""
    return {
        "recipe": {key: value for key, value in recipe.to_dict().items() if key not in ("about", "export")},
        "model": target.fingerprint(),
        "draft": None if draft is None else draft.fingerprint(),
        "versions": versions,
        "seed": options.seed,
        "shard_bytes": options.shard_bytes,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    } | ({"device": options.device, "processes": current().size} if recipe.trains else {})
