"""What the GPU's benchmarks print and write: one table and one JSON object a command."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.gpu.place import Place
from runtime.bench.output import write, write_text
from runtime.bench.rounds import WARM_UP
from runtime.devices import explained
from runtime.errors import UserError
from runtime.kernels.choices import Choice, shown

Row = Mapping[str, Any]
# Column: key of a row, heading, format. A key that a row lacks, or None, is shown as "-".
Column = tuple[str, str, str]


def console() -> Console:
    """Standard output, wide enough for the tables where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 132)


def show(title: str, columns: Sequence[Column], rows: Sequence[Row], place: Place) -> None:
    """One table. A CPU's times are said to be no speed."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for _, heading, form in columns:
        table.add_column(heading, justify="left" if form == "s" else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(key), form) for key, _, form in columns))
    out = console()
    out.print(f"{place.name}; {_warning(place)}", soft_wrap=True)
    out.print(table)


def finish(
    command: str,
    place: Place,
    readings: Sequence[float],
    rounds: int,
    rows: Sequence[Row],
    json_file: Path | None,
    left_out: Sequence[Row] = (),
    **protocol: Any,
) -> None:
    """Prints the memory's speed and what was left out, and writes the file where there is to be one."""
    out = console()
    if readings:
        low, middle, high = (value / 1e9 for value in (min(readings), median(readings), max(readings)))
        out.print(f"Copies: {middle:.0f} GB/s read and written ({low:.0f} to {high:.0f}), in the same rounds.")
    for one in left_out:
        what = ", ".join(str(value) for key, value in one.items() if key != "why")
        out.print(f"Left out: {what}: {one['why']}", soft_wrap=True)
    if json_file is None:
        return
    content = {
        "machine": place.facts(),
        "copy_bandwidth": median(readings) if readings else None,
        "protocol": {
            "command": f"gpu {command}",
            "rounds": rounds,
            "warm_up_rounds": WARM_UP,
            "weights": "random unless a model is named: speed only",
            "times": "of a CPU, interpreted: no speed" if place.interpreted else "CUDA events, medians",
            **protocol,
        },
        "rows": [dict(row) for row in rows],
        "left_out": [dict(one) for one in left_out],
    }
    write(json_file, content)


def show_choices(choices: Sequence[Choice], file: Path | None) -> None:
    """Prints a table of choices as runtime/kernels/choices.json has it, and writes it where there is to be a file."""
    text = shown(choices)
    out = console()
    if choices:
        out.print("Quicker than Triton's kernels, as entries of runtime/kernels/choices.json:")
        out.print(text, soft_wrap=True, markup=False)
    else:
        out.print("No library was quicker than Triton's kernels: nothing belongs into runtime/kernels/choices.json.")
    if file is not None:
        write_text(file, text, "--choices")


def reason(error: Exception) -> str:
    """Why something was left out, in a line: what CUDA's errors mean, a UserError's sentence, or the error itself."""
    if isinstance(error, UserError):
        return str(error)
    meant = explained(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}" if meant is None else str(meant)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _warning(place: Place) -> str:
    if place.interpreted:
        return "a CPU, kernels INTERPRETED or a CPU's own: the times below are no speed"
    return "medians of CUDA events"
