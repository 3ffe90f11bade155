"""Long contexts of a finished artifact beside the original: perplexity by position and needles found, by kind of cache.

python -m compress.quality runs/nf4 --length 1024
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback

if TYPE_CHECKING:
    from compress.quality.figures import LongContext

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    artifact: Annotated[Path, typer.Argument(help="Run folder, or a model directory.")],
    original: Annotated[
        str | None, typer.Option(help="The model it was made of.", show_default="the embedded pair's target")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a context, at most what the models hold.")] = 4096,
    caches: Annotated[str, typer.Option(help="Kinds of cache, by commas.")] = "float32,float16,int8,int4",
    calib: Annotated[
        str | None, typer.Option(help="Text to read.", show_default="this Python's standard library, held-out files")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
    seed: Annotated[int, typer.Option(help="Seed of texts and needles.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reads long contexts with the original and the compressed model, through each kind of cache."""
    with without_traceback(USER_ERRORS):
        from calib import corpora
        from compress.model.source import default_pair
        from compress.quality.long_context import KINDS, long_windows, make_needles, measure
        from runtime import load

        kinds = [kind for kind in KINDS if kind in caches.split(",")]
        if unknown := [one for one in caches.split(",") if one not in KINDS]:
            raise UserError(f"--caches: expected some of {', '.join(KINDS)}, found {', '.join(unknown)}: correct it")
        both = [load(one, device=device, threads=threads) for one in (original or default_pair()[0], artifact)]
        length = min(length, *(model.decoder.max_positions for model in both))
        tokenizer = both[0].tokenizer
        windows = long_windows(corpora.load(calib), tokenizer, length, seed, tokenizer.eos_token_id)
        found = measure(both[0].decoder, both[1].decoder, windows, make_needles(windows, tokenizer, seed), kinds)
    if json_:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print(found)


def _print(found: "LongContext") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = next(row for row in found.rows if row.why is None)
    tables = [
        Table("perplexity at positions", *(f"{one.first}-{one.last}" for one in first.buckets), box=box.SIMPLE),
        Table("needles found", *(f"{one.length} at {one.depth:.0%}" for one in first.needles), box=box.SIMPLE),
    ]
    for row in found.rows:
        name = f"{row.model}, {row.cache}"
        if row.why is not None:
            continue
        tables[0].add_row(name, *(f"{one.perplexity:.3f}" for one in row.buckets))
        tables[1].add_row(name, *(f"{one.found}/{one.tries}" for one in row.needles))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140).print(*tables)
    for row in found.rows:
        if row.why is not None:
            typer.echo(f"{row.model}, {row.cache}: not run: {row.why}")


if __name__ == "__main__":
    app()
