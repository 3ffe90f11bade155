"""`python -m runtime.models` and `specpress models`: how each causal language model of transformers runs here."""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Types of models, such as mamba; all without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the page of the documentation to this file.")] = None,
) -> None:
    """Shows how each architecture of the installed transformers runs: exact, measured, plain or refused, and why.

    Tiny random models are made of what our own decoder does not know, and run: minutes for all of them.
    """
    with without_traceback():
        import transformers
        from rich.console import Console
        from rich.progress import track

        from runtime.models import matrix, page

        # What configurations say of values that a tiny model cannot have, as critical.
        transformers.logging.set_verbosity(logging.CRITICAL + 1)
        shown = Console(stderr=True)
        wanted = names or list(matrix.model_types())
        rows = [matrix.row(name) for name in track(wanted, "models", console=shown, transient=True)]
        if write is not None:
            write.write_text(page.page(rows, transformers.__version__), encoding="utf-8")
        elif as_json:
            typer.echo(json.dumps({"transformers": transformers.__version__, "models": [asdict(row) for row in rows]}))
        else:
            Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(page.table(rows))


if __name__ == "__main__":
    app(prog_name="python -m runtime.models")
