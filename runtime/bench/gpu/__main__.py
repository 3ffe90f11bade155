"""The commands of `python -m runtime.bench gpu`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.commands import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.gpu.place import Place

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What a GPU is measured by.")
Device = Annotated[str, typer.Option(help="cuda, cuda:N, or cpu: interpreted, at toy sizes, no speed.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds that count.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Kernels = Annotated[str, typer.Option(help="auto, triton, bitsandbytes or reference.")]
Widths = Annotated[str, typer.Option(help="Rows of one forward, with commas between them.")]
ShapeNames = Annotated[list[str], typer.Option("--shape", help="A published model's sizes; may be repeated.")]
ShapeName = Annotated[str, typer.Option("--shape", help="A published model's sizes.")]
Schemes = Annotated[list[str], typer.Option("--scheme", help="bf16, int8, int4, nf4 or ternary; may be repeated.")]


def opened(device: str, rounds: int, json_file: Path | None) -> "Place":
    """The place, once the options that all commands share are checked. Raises UserError."""
    from runtime.bench.gpu.place import find

    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, found {rounds}")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(f"--json: {json_file} cannot be a file: it is a folder, or lies in none; name another")
    return find(device)


def numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Numbers with commas between them, in order. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise UserError(f"{option}: expected numbers from 1 to {most} with commas between them, found {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(text, err=True)


@app.command()
def decode(
    shape: ShapeNames = ["tinyllama-1.1b", "llama-3.1-8b", "llama-3.1-70b"],  # noqa: B006 (typer reads it)
    scheme: Schemes = ["bf16", "int8", "int4", "nf4", "ternary"],  # noqa: B006
    widths: Widths = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Tokens in the cache before the step.")] = 512,
    device: Device = "cuda",
    kernels: Kernels = "auto",
    rounds: Rounds = 20,
    json_file: Json = None,
) -> None:
    """Times a step (forward and greedy choice) after a context, at each width, for each scheme."""
    with without_traceback():
        from runtime.bench.gpu.decode import time_shape
        from runtime.bench.gpu.output import finish, show

        place, counts = opened(device, rounds, json_file), numbers("--widths", widths, 256)
        everything: list[dict[str, Any]] = []
        missing: list[dict[str, Any]] = []
        readings: list[float] = []
        for name in shape:
            found, left_out, read = time_shape(place, name, scheme, counts, context, rounds, kernels, say)
            everything, missing, readings = everything + found, missing + left_out, readings + read
            columns = [
                ("scheme", "scheme", "s"), ("what", "what", "s"), ("kernels", "kernels", "s"), ("width", "width", "d"),
                ("ms_median", "ms", ".3f"), ("tokens_per_second", "tokens/s", ".1f"), ("bytes_read", "bytes read", ",d"),
                ("gb_per_second", "GB/s", ".0f"), ("share_of_bandwidth", "of copies' speed", ".0%"),
                ("over_width_1", "over width 1", ".2f"), ("over_bf16", "over bf16", ".2f"),
            ]  # fmt: skip
            show(f"{name}, random weights, after {context} tokens", columns, found, place)
        finish("decode", place, readings, rounds, everything, json_file, missing, context=context)


if __name__ == "__main__":
    app()
