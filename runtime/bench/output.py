"""What the benchmarks print and write."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from runtime.bench.forwards import CONTEXT
from runtime.bench.rounds import WARM_UP, Row, machine
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Plan:
    """What to measure, checked: `command` is kernels, decode or verify."""

    command: str
    shape: str
    schemes: tuple[str, ...]
    head: str
    widths: tuple[int, ...]
    kernel: Kernel
    threads: int
    rounds: int
    json_file: Path | None


def header(plan: Plan) -> str:
    """The line above the tables."""
    context = "" if plan.command == "kernels" else f"; after {CONTEXT} tokens, logits of every row"
    return (
        f"{plan.shape}, random weights: speed only. {machine()['cpu']}, {plan.threads} threads, {plan.kernel.name}"
        f" kernels; head {plan.head}{context}; {plan.rounds} interleaved rounds."
    )


def print_rows(console: "Console", command: str, scheme: str, rows: Sequence[Row], memory: Sequence[float]) -> None:
    """One table; `memory`: readings of its speed in bytes per second."""
    from rich import box
    from rich.table import Table

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    speed = "not measured (needs the native kernels)"
    if memory:
        low, middle, high = (value / 1e9 for value in (min(memory), median(memory), max(memory)))
        speed = f"{middle:.1f} GB/s ({low:.1f} to {high:.1f})"
    table = Table(title=f"{scheme}; memory {speed}", title_justify="left", box=box.SIMPLE)
    table.add_column(command)
    verify = command == "verify"
    for name in ("γ" if verify else "width", "ms median", "ms min", "tokens/s", "GB/s", "of bandwidth", "over width 1"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.what,
            str(row.width - verify),
            f"{row.ms_median:.3f}",
            f"{row.ms_min:.3f}",
            f"{row.tokens_per_second:.1f}",
            show(row.gb_per_second, ".1f"),
            show(row.share_of_bandwidth, ".0%"),
            show(row.over_width_1, ".2f"),
        )
    console.print(table)
    if any(row.share_of_bandwidth is not None and row.share_of_bandwidth > 1 for row in rows):
        console.print("Above 100% of the memory's speed: caches held weights, or the memory's speed changed.\n")


def report(plan: Plan, rows: Sequence[Row], memory: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What goes into the file; bandwidths in bytes per second, null where the native kernels are missing.

    `memory`: by scheme the readings of its speed.
    """
    every = [reading for readings in memory.values() for reading in readings]
    return {
        "machine": machine(),
        "threads": plan.threads,
        "kernels": plan.kernel.name,
        "bandwidth": median(every) if every else None,
        "protocol": {
            "command": plan.command,
            "shape": plan.shape,
            "weights": "random, speed only",
            "head": plan.head,
            "context": None if plan.command == "kernels" else CONTEXT,
            "rounds": plan.rounds,
            "warm_up_rounds": WARM_UP,
            "order": "each round times everything of one scheme once",
            "gb_per_second": "weight bytes as the kernels hold them, without keys and values, over ms_median",
            "share_of_bandwidth": "of the better reading before and after each sample; median over the rounds",
            "bandwidth_by_scheme": {scheme: median(found) if found else None for scheme, found in memory.items()},
        },
        "rows": [asdict(row) for row in rows],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """A report as JSON. Raises UserError as `write_text`."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", "--json")


def write_text(path: Path, text: str, option: str) -> None:
    """Beside, synced, then renamed: the file is whole or as it was. Raises UserError where the disk refuses."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written ({error.strerror}); name another file") from error
