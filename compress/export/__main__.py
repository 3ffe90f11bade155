"""Exports a finished run, or any packed model, to the forms that other engines read.

python -m compress.export runs/int4-gptq --to gptq,awq
python -m compress.export runs/int4-gptq --check
"""

from pathlib import Path
from typing import Annotated

import typer

from compress.errors import USER_ERRORS, UserError
from compress.export import FORMATS
from runtime.checkpoints.locate import here
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    artifact: Annotated[str, typer.Argument(help="Run folder, or a directory with packed weights.")],
    to: Annotated[str, typer.Option(help=f"Forms, by commas: {', '.join(FORMATS)}.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the exports, one folder each.", show_default="ARTIFACT/exports of a run"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace exports that are there.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare SERVE.md and serve/ with what engines accept; an installed vLLM loads it."
        ),
    ] = False,
) -> None:
    """Writes a model in other engines' forms, its calibrated codes repacked, and says what could not be kept.

    A run's SERVE.md, with commands and files for engines, is written anew.
    """
    with without_traceback(USER_ERRORS):
        here(artifact)
        if to or not check:
            _export(artifact, to, out, force)
        if check:
            _check(artifact)


def _export(artifact: str, to: str, out: Path | None, force: bool) -> None:
    from compress import export
    from compress.artifact import manifest
    from compress.export import serve
    from compress.pipeline import exports
    from compress.progress import show
    from compress.recipe.exports import check_exports

    names = check_exports(export.names_in(to))
    if not names:
        raise UserError(f"--to: expected at least one of {', '.join(FORMATS)}, found none: name one")
    place = exports.place(artifact, out)
    with show() as progress:
        made = [export.run(name, place.model, place.exports / name, progress, force) for name in names]
    if place.run is not None:
        exports.add(place.run, made)
    # A draft's forms lie outside exports/, and the page of its run names them.
    if manifest.is_run_folder(place.model.parent):
        serve.write(place.model.parent)
    for exported in made:
        typer.echo(f"{exported.name}: {place.exports / exported.name}, {exported.bytes / 1e6:,.1f} MB")
        for line in exported.sentences():
            typer.echo(f"  {line}")


def _check(artifact: str) -> None:
    from compress.artifact import manifest
    from compress.export import serve
    from runtime.checkpoints.locate import locate

    run = locate(artifact).resolve().parent
    if not manifest.is_run_folder(run):
        raise UserError(f"{Path(artifact).name}: expected a run folder, as only those have a {serve.PAGE}: name one")
    if not (run / serve.PAGE).is_file():
        serve.write(run)
    from compress.export.serve.check import check, load

    found = check(run)
    for engine in found:
        typer.echo(engine.line)
    if wrong := [engine.title for engine in found if engine.unknown]:
        raise UserError(f"{', '.join(wrong)}: expected keys that the engine accepts, found unknown ones: see above")
    for line in load(run):
        typer.echo(line)


if __name__ == "__main__":
    app()
