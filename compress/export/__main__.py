"""Exports a finished run, or any packed model, to the forms that other engines read.

python -m compress.export runs/int4-gptq --to gptq,awq
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    artifact: Annotated[str, typer.Argument(help="Run folder, or a directory with packed weights.")],
    to: Annotated[
        str, typer.Option(help="Forms, by commas: gptq, awq, compressed-tensors, bitsandbytes, bitnet, gguf.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the exports, one folder each.", show_default="ARTIFACT/exports of a run"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace exports that are there.")] = False,
) -> None:
    """Writes a model in other engines' forms, its calibrated codes repacked, and says what could not be kept."""
    from compress.errors import USER_ERRORS

    try:
        _export(artifact, to, out, force)
    except USER_ERRORS as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"error: {error.filename or 'a file'} cannot be used ({error.strerror or error})", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("error: stopped by Ctrl-C", err=True)
        raise typer.Exit(130) from None


def _export(artifact: str, to: str, out: Path | None, force: bool) -> None:
    from compress import export

    names = export.check_names(export.names_in(to))
    from compress.export import record
    from compress.progress import show

    place = record.place(artifact, out)
    made = []
    with show() as progress:
        for name in names:
            made.append(export.run(name, place.model, place.exports / name, progress, force))
    if place.run is not None:
        record.add(place.run, made)
    for exported in made:
        typer.echo(f"{exported.name}: {place.exports / exported.name}, {exported.bytes / 1e6:,.1f} MB")
        for line in exported.sentences():
            typer.echo(f"  {line}")


if __name__ == "__main__":
    app()
