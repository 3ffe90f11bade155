"""`specpress report`: the report of a finished run, in the terminal, as JSON or in the browser."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback
from runtime.files import regular

if TYPE_CHECKING:
    from compress.artifact import Artifact


def command(
    run: Annotated[str, typer.Argument(help="Run folder.")],
    open_: Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False,
) -> None:
    """Prints the summary and the whole report of a run."""
    with without_traceback(USER_ERRORS):
        artifact = find_run(run)
        if open_:
            _open(artifact.path / "report.html")
        elif as_json:
            typer.echo(json.dumps(artifact.report, indent=2, ensure_ascii=False))
        else:
            _print(artifact)


def find_run(name: str) -> "Artifact":
    """The run folder of this name; its `model/` names it as well. Raises UserError for anything else."""
    from compress.artifact import Artifact, manifest

    folder = Path(name).expanduser()
    if folder.name == "model" and manifest.is_run_folder(folder.parent):
        folder = folder.parent
    if manifest.is_run_folder(folder):
        return Artifact(folder)
    raise UserError(f"{name}: expected a run folder, with a manifest.json of a finished run: name one")


def _open(page: Path) -> None:
    import webbrowser

    if not page.is_file():
        raise UserError(f"{page} is missing: run again, or print the report without --open")
    if not webbrowser.open(page.resolve().as_uri()):
        raise UserError(f"no browser could be opened here: open {page} yourself")


def _print(artifact: "Artifact") -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from compress.report.files import read_report
    from compress.run import summary_rows, summary_tables

    report = read_report(artifact.path)
    text = regular(artifact.path / "report.md").read_text(encoding="utf-8")
    if sys.stdout.isatty():
        Console().print(*summary_tables(report), Markdown(text))
        return
    typer.echo("".join(f"{label}: {value}\n" for label, value in summary_rows(report)))
    typer.echo(text, nl=False)
