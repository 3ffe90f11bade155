"""What the benchmarks print and write."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.forwards import CONTEXT
from runtime.bench.measure import WARM_UP, Place, Row, machine
from runtime.devices import explained
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.kernels.library_choice import Choice, shown

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


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def show_speculation(facts: dict[str, Any], found: dict[str, Any]) -> None:

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print(_title(facts), soft_wrap=True)
    gamma = "chosen" if found["draft_length"] is None else found["draft_length"]
    console.print(
        f"drafter {found['drafter']}, γ {gamma}, batch {found['batch']}, temperature {found['temperature']:g}"
        f" ({found['verify']}), {found['prompts']} prompts, {found['rounds']} rounds\n",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    for name in ("group", "prompts", "tokens/s", "speedup", "α", "τ"):
        table.add_column(name, justify="left" if name == "group" else "right")
    whole = {"name": "all", "tokens_per_second": found["speculative"]["tokens_per_second"]}
    rows = [found | whole, *(found["groups"] if len(found["groups"]) > 1 else [])]
    for row in rows:
        table.add_row(
            row["name"],
            str(row["prompts"]),
            _number(row["tokens_per_second"], ".1f"),
            _number(row["speedup"], ".2f"),
            _number(row["acceptance_rate"], ".3f"),
            _number(row["tokens_per_round"], ".2f"),
        )
    console.print(table)
    plain, itl, ttft = found["plain"], found["speculative"]["itl_ms"], found["ttft_ms"]
    lines = (
        f"plain {plain['tokens_per_second']:.1f} tokens/s; predicted speedup"
        f" {_number(found['predicted_with_prompts'], '.2f')}; without the prompts' time"
        f" {_number(found['decode_speedup'], '.2f')}, predicted {_number(found['predicted_speedup'], '.2f')}",
        f"{_number(found['drafted_per_round'], '.2f')} drafted a round; a draft step costs"
        f" {_number(found['draft_step_ratio'], '.3f')} of a target step,"
        f" {_number(found['draft_cost_ratio'], '.3f')} with the drafter's reading of the prompts",
        f"{_number(found['mismatches'], 'd')} of {found['prompts']} texts differ from plain decoding's",
        f"first token {_number(ttft['p50'], '.1f')} ms (p50), {_number(ttft['p90'], '.1f')} (p90); between tokens"
        f" {_number(itl['p50'], '.2f')} (p50), {_number(itl['p99'], '.2f')} (p99)",
        f"keys and values: {found['kv_bytes_per_token']:,} bytes a token",
    )
    console.print("\n".join(lines), soft_wrap=True)


def show_load(facts: dict[str, Any], results: dict[str, Any]) -> None:

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(_title(facts), soft_wrap=True)
    table = Table(box=box.SIMPLE)
    columns = (
        "way",
        "asked/s",
        "served/s",
        "tokens/s",
        "latency p50",
        "p90",
        "ttft p50",
        "p90",
        "itl p50",
        "p99",
        "batch",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, found in results.items():
        for run in found["runs"]:
            times: Sequence[float | None] = (
                run["latency_ms"]["p50"], run["latency_ms"]["p90"], run["ttft_ms"]["p50"], run["ttft_ms"]["p90"],
                run["itl_ms"]["p50"], run["itl_ms"]["p99"],
            )  # fmt: skip
            table.add_row(
                name,
                f"{run['rate']:.2f}",
                f"{run['requests_per_second']:.2f}",
                f"{run['tokens_per_second']:.1f}",
                *(_number(value, ".1f") for value in times),
                f"{run['mean_batch']:.1f}",
            )
    console.print(table)
    for name, found in results.items():
        if found["highest_rate"] is not None:
            console.print(f"{name}: highest rate under the bound {found['highest_rate']:.2f} requests/s")


def _title(facts: dict[str, Any]) -> str:
    weights = ", random weights: speed only" if facts["random_weights"] else ""
    where = facts["machine"].get("device") or facts["machine"]["cpu"]
    return (
        f"{facts['target']}{weights}. {where}, {facts['threads']} threads,"
        f" {facts['kernels']} kernels. Milliseconds; the prompt's time is included."
    )


Figures = Mapping[str, Any]
# Column: key of a row, heading, format. A key that a row lacks, or None, is shown as "-".
Column = tuple[str, str, str]


def console() -> Console:
    """Standard output, wide enough for the tables where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 132)


def show(title: str, columns: Sequence[Column], rows: Sequence[Figures], place: Place) -> None:
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
    rows: Sequence[Figures],
    json_file: Path | None,
    left_out: Sequence[Figures] = (),
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
