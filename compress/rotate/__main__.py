"""Writes a rotated model, plain or packed, as a plain one in its original's basis.

python -m compress.rotate runs/trellis-3-rotated unfolded
"""

from pathlib import Path
from typing import Annotated

import typer

from compress.artifact import SHARD_BYTES
from compress.errors import USER_ERRORS
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Run folder or model directory whose weights are rotated.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, which is not there yet.")],
) -> None:
    """Undoes a rotation: writes plain weights that can be laid beside the original's."""
    with without_traceback(USER_ERRORS):
        from compress.rotate.unfold import unfold
        from runtime.checkpoints.locate import locate

        unfold(locate(model), out, SHARD_BYTES)
        typer.echo(f"{out}: unfolded")


if __name__ == "__main__":
    app()
