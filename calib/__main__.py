"""The command `python -m calib.corpora prompts`, which is `python -m calib prompts`, too."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Text from files, datasets and this machine's standard library.", add_completion=False)


@app.callback()
def _keep_the_command_name() -> None:
    pass


@app.command("prompts")
def cut_prompts(
    out: Annotated[Path, typer.Argument(help="JSONL file to write: one {'prompt': …} per line.")],
    source: Annotated[str, typer.Option(help="stdlib, a file, a directory, or a dataset's name.")] = "stdlib",
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 50,
    seed: Annotated[int, typer.Option(help="Which ones: the same seed gives the same prompts.")] = 0,
) -> None:
    """Cut prompts out of a text."""
    from calib.corpora import load
    from calib.errors import UserError
    from calib.prompts import prompts, write_prompts
    from runtime.cli import without_traceback

    with without_traceback((UserError,)):
        corpus = load(source)
        write_prompts(prompts(corpus, count, seed), out)
        typer.echo(f"{count} prompts from {corpus.name} in {out}", err=True)


if __name__ == "__main__":
    app()
