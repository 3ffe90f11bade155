"""The walk: from a model's shards to an artifact, block by block, then the report.

Peak memory is the largest tensor outside the blocks plus one block and its quantised copy.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import manifest, shards, workspace
from compress.artifact import Artifact
from compress.errors import UserError
from compress.export import huggingface
from compress.files import write_atomic
from compress.journal import Journal
from compress.plan import Layer, Plan, make_plan
from compress.quantize import rtn
from compress.recipe import Recipe
from compress.report.facts import LayerRecord, ReportOptions, RunFacts
from compress.sources import Source, open_sources
from compress.survey import survey
from runtime.checkpoint import Checkpoint, check_finite
from runtime.formats import dequantize

Progress = Callable[[str, int, int], None]
Report = Callable[[RunFacts, ReportOptions, Progress], dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """Everything about a run that is not the model or the recipe. None: the recipe's value, else the report's default.

    speed        False: no figure of the report is timed.
    shard_bytes  most bytes in one file of weights.
    """

    draft: str | None = None
    calib: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    eval_tokens: int = 16_384
    new_tokens: int = 64
    draft_length: int = 4
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    resume: bool = False
    force: bool = False
    speed: bool = True
    shard_bytes: int = shards.SHARD_BYTES


# option: (least, most)
RANGES: dict[str, tuple[int, int]] = {
    "samples": (1, 100_000),
    "seq_len": (8, 131_072),
    "eval_tokens": (8, 100_000_000),
    "new_tokens": (1, 100_000),
    "draft_length": (1, 64),
    "threads": (1, 1024),
    "seed": (0, 2**63 - 1),
    "shard_bytes": (1, 2**62),
}


def silent(stage: str, done: int, total: int) -> None:
    """Progress for those who do not want to see any."""


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
) -> Artifact:
    """See `compress`. `report` makes the report (default: report.assemble), `command` is what it shows to reproduce."""
    check_ranges(options)
    place = workspace.check(Path(out if out is not None else f"runs/{recipe.name}"), options.resume, options.force)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if report is None:
        from compress.report.assemble import make_report

        report = make_report
    progress("check", 0, 1)
    target, draft = open_sources(model, options.draft)
    plan = make_plan(target.shapes(), survey(target.path), recipe.quantize)
    settings = _settings(recipe, options)
    _check_text(target, settings, options.seed)
    progress("check", 1, 1)
    versions = manifest.versions()
    with workspace.opened(place, _fingerprint(recipe, target, draft, versions, options)) as journal:
        records = _weights(target.checkpoint, plan, journal, progress)
        progress("write", 0, 1)
        _assemble(place.folder, target, draft, recipe, plan, journal, options.shard_bytes)
        names = {"model": target.name, "draft": None if draft is None else draft.name}
        # Round to nearest looks at no text, whatever was asked for.
        samples = {"samples_requested": settings.samples, "samples_used": 0}
        about = {"recipe": recipe.name, **names, "seed": options.seed, "versions": versions, "calibration": samples}
        manifest.write(place.folder, about)
        progress("write", 1, 1)
        facts = RunFacts(
            recipe=recipe.to_dict(),
            model_name=target.name,
            draft_name=names["draft"],
            original=target.path,
            folder=place.folder,
            model=place.folder / "model",
            draft=None if draft is None else place.folder / "draft",
            layers=tuple(records),
            left_alone=plan.left_alone,
            calibration={},
            command=command or f"python -m compress.run --recipe {recipe.name}",
            seed=options.seed,
            versions=versions,
        )
        report(facts, settings, progress)
        place.finish()
    return Artifact(place.out)


def check_ranges(options: Options) -> None:
    """Raises UserError naming the first number that is out of its range."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: expected a whole number from {least} to {most}, found {value}: correct it")
    if options.device.split(":")[0] not in ("cpu", "cuda", "auto"):
        raise UserError(f"--device: expected cpu, cuda or auto, found {options.device!r}: correct it")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device: {options.device} was asked for, but torch finds no CUDA device: take cpu or auto")


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


def _check_text(target: Source, settings: ReportOptions, seed: int) -> None:
    """Draws the windows that the report will, so that text that is too short stops the run before it works."""
    from calib import corpora
    from calib.windows import make_windows

    make_windows(
        corpora.load(settings.text),
        target.tokenizer,
        length=min(settings.seq_len, target.max_positions),
        calibration=settings.samples,
        evaluation_tokens=settings.eval_tokens,
        seed=seed,
        separator=target.tokenizer.eos_token_id,
    )


def _fingerprint(
    recipe: Recipe, target: Source, draft: Source | None, versions: dict[str, str], options: Options
) -> dict[str, Any]:
    """Everything that the journalled bytes depend on."""
    return {
        "recipe": {key: value for key, value in recipe.to_dict().items() if key != "about"},
        "model": target.fingerprint(),
        "draft": None if draft is None else draft.fingerprint(),
        "versions": versions,
        "seed": options.seed,
        "shard_bytes": options.shard_bytes,
    }


def _weights(checkpoint: Checkpoint, plan: Plan, journal: Journal, progress: Progress) -> list[LayerRecord]:
    """Quantises part by part into the partial folder; parts that the journal has are done."""
    records: list[LayerRecord] = []
    for number, (part, names) in enumerate(plan.parts):
        progress("quantize", number, len(plan.parts))
        if part not in journal.parts:
            tensors, made = _part(checkpoint, plan, names)
            file = f"part-{number:05d}.safetensors"
            size = shards.write_part(journal.folder / file, tensors)
            journal.commit(part, {"file": file, "bytes": size, "layers": [asdict(record) for record in made]})
        records += [LayerRecord(**record) for record in journal.parts[part]["layers"]]
    progress("quantize", len(plan.parts), len(plan.parts))
    return records


def _part(checkpoint: Checkpoint, plan: Plan, names: tuple[str, ...]) -> tuple[dict[str, Tensor], list[LayerRecord]]:
    tensors: dict[str, Tensor] = {}
    records = []
    for name in names:
        tensor = checkpoint.tensor(name)
        check_finite(name, tensor)
        layer = plan.layers.get(name)
        if layer is None:
            tensors[name] = tensor
            continue
        stored, record = _quantized(tensor, layer)
        tensors |= stored
        records.append(record)
    return tensors, records


def _quantized(weight: Tensor, layer: Layer) -> tuple[dict[str, Tensor], LayerRecord]:
    if layer.transposed:
        weight = weight.T.contiguous()
    packed = rtn.quantize(weight, layer.scheme, layer.group_size)
    stored = rtn.to_tensors(packed, layer.prefix, weight.dtype)
    record = LayerRecord(
        name=layer.prefix,
        scheme=layer.scheme,
        group_size=layer.group_size,
        weights=weight.numel(),
        stored_bytes=sum(t.numel() * t.element_size() for t in stored.values()),
        error=rtn.relative_error(weight, dequantize(packed)),
    )
    return stored, record


def _assemble(
    folder: Path,
    target: Source,
    draft: Source | None,
    recipe: Recipe,
    plan: Plan,
    journal: Journal,
    shard_bytes: int,
) -> None:
    """Puts model/, draft/ and recipe.yaml together in the partial folder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    shards.join([folder / journal.parts[part]["file"] for part, _ in plan.parts], model, shard_bytes)
    huggingface.write_config(target.path, model, huggingface.quantization_config(plan, target.checkpoint.config))
    huggingface.copy_companions(target.path, model)
    if draft is not None:
        huggingface.copy_model(draft.path, folder / "draft", draft.weight_files)
    write_atomic(folder / "recipe.yaml", recipe.to_yaml().encode())
