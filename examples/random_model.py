"""A model of a published shape with seeded random weights in bfloat16 and the embedded pair's tokenizer.

    python examples/random_model.py llama-2-7b /data/llama-2-7b-random
    specpress compress --recipe int4-rtn --model /data/llama-2-7b-random --eval-tokens 0 --no-speed

For trying how much memory, disk and time a compression of a large model takes, without downloading one: one shard per
block, 13.5 GB in all for 7 billion weights. What it writes means nothing.
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from compress.model.source import default_pair
from runtime.bench.random_models import write_shape
from runtime.bench.shapes import SHAPES
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    shape: Annotated[str, typer.Argument(help=", ".join(SHAPES))],
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    scheme: Annotated[str, typer.Option(help="bf16, or f32.")] = "bf16",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Writes the model; the same arguments give the same bytes."""
    with without_traceback():
        folder = write_shape(shape, scheme, out, head="keep", seed=seed)
        target, _ = default_pair()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(target / name, folder / name)


if __name__ == "__main__":
    app()
