"""The options that the commands of `python -m runtime.bench gpu` share, and their checks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.measure import Place

Device = Annotated[str, typer.Option(help="cuda, cuda:N, or cpu: interpreted, at toy sizes, no speed.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds that count.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Choices = Annotated[
    Path | None, typer.Option("--choices", help="Write what was quicker than Triton, as runtime/kernels/choices.json.")
]
Kernels = Annotated[str, typer.Option(help="auto, triton, library, a library's name, bitsandbytes or reference.")]
Widths = Annotated[str, typer.Option(help="Rows of one forward, with commas between them.")]
ShapeNames = Annotated[list[str], typer.Option("--shape", help="A published model's sizes; may be repeated.")]
ShapeName = Annotated[str, typer.Option("--shape", help="A published model's sizes.")]
Schemes = Annotated[list[str], typer.Option("--scheme", help="bf16, fp8, int8, int4, nf4 or ternary; may be repeated.")]
NewTokens = Annotated[int, typer.Option(help="Tokens of each text.")]


def opened(device: str, rounds: int, *files: Path | None) -> "Place":
    """The place, once the options that all commands share are checked; `files` will be written. Raises UserError."""
    from runtime.bench.measure import find

    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, found {rounds}")
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            option = "--json" if file is files[0] else "--choices"
            raise UserError(f"{option}: {file} cannot be a file: it is a folder, or lies in none; name another")
    return find(device)


def numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Numbers with commas between them, in order. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise UserError(f"{option}: expected numbers from 1 to {most} with commas between them, found {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def known(shapes: list[str]) -> list[str]:
    """The shapes, each once. Raises UserError for one that is not offered."""
    from runtime.bench.random_models import SHAPES

    if unknown := [name for name in shapes if name not in SHAPES]:
        raise UserError(f"--shape: {unknown[0]!r} is unknown; use one of {', '.join(SHAPES)}")
    return list(dict.fromkeys(shapes))


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(text, err=True)
