"""Where exports of a run go, and how its manifest and report learn of them."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import manifest
from compress.errors import UserError
from compress.export import Exported, Progress, check_kinds
from compress.export import run as export
from compress.model.plan import Plan
from compress.recipe import Recipe
from runtime.checkpoints.locate import locate
from runtime.formats.schemes import SCHEMES

FOLDER = "exports"


@dataclass(frozen=True)
class Place:
    """model: what is exported; exports: the folder of folders; run: the run folder that keeps them, if one does."""

    model: Path
    exports: Path
    run: Path | None


def place(artifact: str | Path, out: Path | None = None) -> Place:
    """The model of a run folder or model directory, and where its exports go (`out`, else the run's exports/).

    Raises UserError where there is no model, and for a model that is in no run folder without `out`.
    """
    model = locate(artifact).resolve()
    run = model.parent if model.name == "model" and manifest.is_run_folder(model.parent) else None
    if out is not None:
        return Place(model, out, None)
    if run is None:
        raise UserError(f"{model.name} is in no run folder, so its exports have no place: name one with --out")
    return Place(model, run / FOLDER, run)


def wanted(recipe: Recipe, asked: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """The recipe's exports and those asked for, each once.

    Raises UserError where a form cannot hold what the recipe packs: before the work, not after it.
    """
    names = tuple(dict.fromkeys((*(recipe.export or ()), *asked)))
    if names:
        trained = [stage.ternary or stage.qat for stage in recipe.stages]
        schemes = [layer.scheme for layer in plan.layers.values()]
        schemes += [str(stage.quantize().scheme) for stage in trained if stage is not None]
        check_kinds(names, {SCHEMES[scheme].kind for scheme in schemes})
    return names


def make(run: Path, names: Sequence[str], progress: Progress) -> tuple[dict[str, Any], ...]:
    """Exports a run that is being made: each one's `Exported.to_dict()`. What a killed run has left there goes away."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    return tuple(export(name, run / "model", run / FOLDER / name, progress).to_dict() for name in sorted(names))


def add(run: Path, made: Sequence[Exported]) -> None:
    """Enters exports into manifest.json and, where the run has one, into the report."""
    from compress.report.exports import merged
    from compress.report.files import read_report, write_report

    new = {exported.name: exported.to_dict() for exported in made}
    about = manifest.read(run)
    known = {entry["name"]: entry for entry in about.get("exports", [])}
    entries = [entry for _, entry in sorted((known | new).items())]
    about = {key: value for key, value in about.items() if key not in ("schema", "files")}
    manifest.write(run, {**about, "exports": entries})
    if not (run / "report.json").is_file():
        return
    write_report(merged(read_report(run), list(new.values())), run)
