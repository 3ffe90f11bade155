"""The command that draws a report as one picture, for a README.

python -m compress.report.picture runs/nf4 --out docs/report.svg
"""

from pathlib import Path
from typing import Annotated

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="File to write: .svg or .png.")] = Path("report.svg"),
) -> None:
    """Draws a run's report as one light picture."""
    with without_traceback(USER_ERRORS):
        # Imported here: matplotlib takes longer to load than `--help` may take.
        from compress.artifact.files import write_atomic
        from compress.report.figure import png, svg
        from compress.report.files import read_report
        from compress.report.overview import draw

        writers = {".svg": svg, ".png": png}
        if out.suffix not in writers:
            raise UserError(f"--out: expected a name that ends in .svg or .png, found {out.name}: correct it")
        figure = draw(read_report(run))
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, writers[out.suffix](figure))
        typer.echo(f"Picture: {out}")


if __name__ == "__main__":
    app()
