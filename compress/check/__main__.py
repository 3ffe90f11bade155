"""Says whether a compressed model is what it should be, whoever wrote it.

python -m compress.check model-awq/
python -m compress.check model-awq/ --original original/ --page check.html
"""

from pathlib import Path
from typing import Annotated

import typer

from compress.errors import USER_ERRORS
from runtime.checkpoints.locate import here
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[str, typer.Argument(help="Model directory, run folder or GGUF file to check.")],
    original: Annotated[str, typer.Option(help="The model that it was made of: a directory or org/name.")] = "",
    text: Annotated[
        Path | None, typer.Option(help="Text to run both on.", show_default="this machine's Python source")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, max=8192, help="Tokens of the text to run; 0: none.")] = 256,
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the result as one HTML file.")] = None,
) -> None:
    """Says whether a compressed model is what it should be, whoever wrote it: GPTQ, AWQ, compressed-tensors,
    bitsandbytes, BitNet, GGUF, plain, or ours.

    Ends with 0 where all is good, with 1 where something is suspicious or broken, with 2 for a mistake in the command.
    """
    with without_traceback(USER_ERRORS):
        here(folder)
        if original:
            here(original)
        from compress.check.check import Text, check
        from compress.check.show import show
        from compress.progress import show as show_progress

        with show_progress() as progress:
            result = check(folder, original or None, Text(text, tokens), progress)
        if page is not None:
            from compress.artifact import files
            from compress.check.page import html

            files.write_atomic(page, html(result).encode())
        if json:
            typer.echo(result.model_dump_json(indent=2))
        else:
            show(result)
        if result.level != "good":
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
