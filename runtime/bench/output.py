"""What the benchmarks print and write: tables whose columns are keys of rows, and JSON files."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.measure import WARM_UP, Bench, Place
from runtime.errors import UserError
from runtime.kernels.library_choice import Choice, shown

Figures = Mapping[str, Any]
COLUMNS: dict[str, tuple[str, str]] = {
    "what": ("what", "s"), "name": ("group", "s"), "way": ("way", "s"), "scheme": ("scheme", "s"),
    "layer": ("layer", "s"), "engine": ("engine", "s"), "kernels": ("kernels", "s"), "how": ("run as", "s"),
    "width": ("width", "d"), "batch": ("batch", "d"), "prompts": ("prompts", "d"), "draft_length": ("γ", "d"),
    "block_n": ("outputs", "d"), "warps": ("warps", "d"), "stages": ("stages", "d"), "programs": ("programs", "d"),
    "ms_median": ("ms", ".4f"), "ms_min": ("ms min", ".4f"), "step_ms": ("step ms", ".2f"),
    "ms_per_token": ("ms a token", ".2f"), "computed_ms": ("computed ms", ".3f"),
    "bytes_read": ("bytes read", ",d"), "bytes_computed": ("bytes computed", ",d"), "bytes_held": ("bytes held", ",d"),
    "gb_per_second": ("GB/s", ".1f"), "share_of_bandwidth": ("of bandwidth", ".0%"),
    "tokens_per_second": ("tokens/s", ".1f"), "plain_tokens_per_second": ("plain tokens/s", ".0f"),
    "speculative_tokens_per_second": ("speculative", ".0f"), "over_width_1": ("over width 1", ".2f"),
    "over_bf16": ("over bf16", ".2f"), "over_eager": ("over eager", ".2f"), "relative_error": ("error", ".1e"),
    "same_bits": ("same bits", ""), "acceptance_rate": ("α", ".3f"), "tokens_per_round": ("τ", ".2f"),
    "draft_cost_ratio": ("c", ".3f"), "speedup": ("speedup", ".2f"), "decode_speedup": ("without prompts", ".2f"),
    "predicted_speedup": ("predicted", ".2f"), "mismatches": ("texts that differ", "d"),
    "rate": ("asked/s", ".2f"), "requests_per_second": ("served/s", ".2f"), "mean_batch": ("batch", ".1f"),
    "latency_ms.p50": ("latency p50", ".1f"), "latency_ms.p90": ("p90", ".1f"), "ttft_ms.p50": ("ttft p50", ".1f"),
    "clients": ("clients", "d"), "in_process.tokens_per_second": ("tokens/s alone", ".1f"),
    "http.tokens_per_second": ("over HTTP", ".1f"),
    "ratio": ("ratio", ".3f"),
    "in_process.ttft_ms": ("ttft alone", ".2f"), "http.ttft_ms": ("over HTTP", ".2f"),
    "ttft_added_ms": ("added", ".2f"),
    "cluster.tokens_per_second": ("cluster", ".1f"), "cluster.ratio": ("over server", ".3f"),
    "cluster.ttft_ms": ("cluster", ".2f"), "cluster.ttft_added_ms": ("added", ".2f"),
    "split": ("split", "s"), "category": ("category", "s"), "input_tokens": ("input", ".0f"),
    "concurrency": ("at a time", "d"), "tokens_per_second_per_user": ("per user", ".1f"), "ttft_ms": ("ttft ms", ".1f"),
    "accept_length": ("tokens a round", ".2f"),
    "measured.p50": ("measured p50", ".1f"), "measured.p90": ("p90", ".1f"),
    "replicas": ("replicas", "d"), "reuse": ("reused", ".0%"), "busy": ("busy", ".0%"),
    "imbalance": ("most / mean", ".2f"), "price_per_million": ("per million tokens", ".2f"),
    "ttft_ms.p90": ("p90", ".1f"), "itl_ms.p50": ("itl p50", ".1f"), "itl_ms.p99": ("p99", ".1f"),
}  # fmt: skip
"""Every figure's key in a row (a.b: in the mapping at a): its heading and format. What a row lacks is shown as "-"."""


def console(width: int = 132) -> Console:
    """Standard output, `width` characters wide where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else width)


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Figures], title: str | None = None) -> Table:
    """A line for each row, a column for each (key, heading, format)."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE)
    for _, heading, form in columns:
        found.add_column(heading, justify="left" if form == "s" else "right")
    for row in rows:
        found.add_row(*(_shown(_value(row, key), form) for key, _, form in columns))
    return found


def listed(keys: str, rows: Sequence[Figures], title: str | None = None, **headings: str) -> Table:
    """The table of `keys` of COLUMNS, with blanks between them; `headings` other than those of COLUMNS."""
    return table([(key, headings.get(key, COLUMNS[key][0]), COLUMNS[key][1]) for key in keys.split()], rows, title)


def show_scheme(out: Console, command: str, scheme: str, rows: Sequence[Figures], readings: Sequence[float]) -> None:
    """A scheme's table of `kernels`, `decode` or `verify`; `readings` of the memory's speed in bytes per second."""
    speed = f"{_speeds(readings, '.1f')}" if readings else "not measured (needs the native kernels)"
    keys = "what width ms_median ms_min tokens_per_second bytes_read gb_per_second share_of_bandwidth over_width_1"
    if command == "verify":
        keys = keys.replace("width", "draft_length", 1)
        rows = [{**row, "draft_length": row["width"] - 1} for row in rows]
    out.print(listed(keys, rows, f"{scheme}; memory {speed}", what=command))
    if any((row["share_of_bandwidth"] or 0) > 1 for row in rows):
        out.print("Above 100% of the memory's speed: caches held weights, or the memory's speed changed.\n")


def show_speculation(facts: Figures, found: Figures) -> None:
    """What `speculate` found: speculative against plain decoding, by groups of prompts."""
    out = console(100)
    out.print(_title(facts), soft_wrap=True)
    gamma = "chosen" if found["draft_length"] is None else found["draft_length"]
    out.print(
        f"drafter {found['drafter']}, γ {gamma}, batch {found['batch']}, temperature {found['temperature']:g}"
        f" ({found['verify']}), {found['prompts']} prompts, {found['rounds']} rounds\n",
        soft_wrap=True,
    )
    whole = {**found, "name": "all", "tokens_per_second": found["speculative"]["tokens_per_second"]}
    keys = "name prompts tokens_per_second speedup acceptance_rate tokens_per_round"
    out.print(listed(keys, [whole, *(found["groups"] if len(found["groups"]) > 1 else [])]))
    plain, itl, ttft = found["plain"], found["speculative"]["itl_ms"], found["ttft_ms"]
    lines = (
        f"plain {plain['tokens_per_second']:.1f} tokens/s; predicted speedup"
        f" {_shown(found['predicted_with_prompts'], '.2f')}; without the prompts' time"
        f" {_shown(found['decode_speedup'], '.2f')}, predicted {_shown(found['predicted_speedup'], '.2f')}",
        f"{_shown(found['drafted_per_round'], '.2f')} drafted a round; a draft step costs"
        f" {_shown(found['draft_step_ratio'], '.3f')} of a target step,"
        f" {_shown(found['draft_cost_ratio'], '.3f')} with the drafter's reading of the prompts",
        f"{_shown(found['mismatches'], 'd')} of {found['prompts']} texts differ from plain decoding's",
        f"first token {_shown(ttft['p50'], '.1f')} ms (p50), {_shown(ttft['p90'], '.1f')} (p90) after all prompts came"
        f" at once, the wait for a place included; between tokens {_shown(itl['p50'], '.2f')} (p50),"
        f" {_shown(itl['p99'], '.2f')} (p99)",
        f"keys and values: {found['kv_bytes_per_token']:,} bytes a token",
    )
    out.print("\n".join(lines), soft_wrap=True)


def show_speed_bench(facts: Figures, about: Figures, rows: Sequence[Figures], categories: Mapping[str, float]) -> None:
    """SPEED-Bench's two splits: acceptance by category and position, and speed by input length and concurrency."""
    out = console(110)
    out.print(_title(facts), soft_wrap=True)
    out.print(f"drafter {about['drafter']}, γ {about['draft_length']}, greedy\n", soft_wrap=True)
    first = rows[0]
    out.print(listed("category accept_length", [{"category": n, "accept_length": v} for n, v in categories.items()]))
    places = ", ".join(f"{share:.2f}" for share in first["accepted_by_position"])
    out.print(f"accepted up to position 1, 2, …: {places or 'nothing'}\n", soft_wrap=True)
    keys = "split input_tokens concurrency plain_tokens_per_second tokens_per_second tokens_per_second_per_user speedup"
    out.print(listed(f"{keys} ttft_ms accept_length mismatches", rows))


def show_load(facts: Figures, results: Mapping[str, Figures], bounded: bool) -> None:
    """What `load` found: a row for each rate that was tried, plain and speculative, and the highest under a bound."""
    out = console(110)
    out.print(_title(facts), soft_wrap=True)
    keys = "way rate requests_per_second tokens_per_second latency_ms.p50 latency_ms.p90 ttft_ms.p50 ttft_ms.p90"
    rows = [{"way": name, **run} for name, found in results.items() for run in found["runs"]]
    out.print(listed(f"{keys} itl_ms.p50 itl_ms.p99 mean_batch", rows))
    for name, found in results.items():
        if found["highest_rate"] is not None:
            out.print(f"{name}: highest rate under the bound {found['highest_rate']:.3g} requests/s")
        elif bounded:
            out.print(f"{name}: no rate that was tried stays under the bound")


def show_http(facts: Figures, rows: Sequence[Figures]) -> None:
    """What `http` found: a row for each number of clients."""
    out = console(110)
    out.print(_title(facts), soft_wrap=True)
    speeds = "in_process.tokens_per_second http.tokens_per_second ratio"
    out.print(listed(f"clients {speeds} in_process.ttft_ms http.ttft_ms ttft_added_ms", rows))
    if "cluster" in rows[0]:
        speeds = "http.tokens_per_second cluster.tokens_per_second cluster.ratio"
        keys = f"clients {speeds} http.ttft_ms cluster.ttft_ms cluster.ttft_added_ms"
        out.print(listed(keys, rows, "A replica on Ray behind the ingress, against the server alone"))


def show(title: str, keys: str, rows: Sequence[Figures], place: Place) -> None:
    """One table of `gpu`, of `keys` as `listed` takes them. A CPU's times are said to be no speed."""
    told = "medians of CUDA events"
    if not place.is_gpu:
        told = "a CPU, kernels INTERPRETED or a CPU's own: the times below are no speed"
    out = console()
    out.print(f"{place.name}; {told}", soft_wrap=True)
    out.print(listed(keys, rows, title))


def finish(command: str, bench: Bench, json_file: Path | None, timed: bool = True, **protocol: Any) -> None:
    """Ends a command of `gpu`: the memory's speed, what was left out, and the file where there is to be one.

    timed  whether the memory's speed was measured in the same rounds.
    """
    out, place, readings = console(), bench.place, bench.bandwidth.readings if timed else []
    if readings:
        out.print(f"Copies: {_speeds(readings, '.0f').replace(' (', ' read and written (')}, in the same rounds.")
    for one in bench.left_out:
        what = ", ".join(str(value) for key, value in one.items() if key != "why")
        out.print(f"Left out: {what}: {one['why']}", soft_wrap=True)
    if json_file is None:
        return
    content = {
        "machine": place.facts(),
        "copy_bandwidth": median(readings) if readings else None,
        "protocol": {
            "command": f"gpu {command}",
            "rounds": bench.rounds,
            "warm_up_rounds": WARM_UP,
            "weights": "random unless a model is named: speed only",
            "times": "CUDA events, medians" if place.is_gpu else "of a CPU, interpreted: no speed",
            **protocol,
        },
        "rows": bench.rows,
        "left_out": bench.left_out,
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


def write(path: Path, content: Figures) -> None:
    """A report as JSON. Raises UserError as `write_text`."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", "--json")


def write_text(path: Path, text: str, option: str) -> None:
    """Beside, synced, then renamed: the file is whole or as it was. Raises UserError where the disk refuses."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        # Whatever an earlier run left, or somebody put there: opening a pipe would wait.
        beside.unlink(missing_ok=True)
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written ({error.strerror}); name another file") from error


def _value(row: Figures, key: str) -> Any:
    first, dot, rest = key.partition(".")
    return _value(row[first], rest) if dot else row.get(first)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speeds(readings: Sequence[float], form: str) -> str:
    low, middle, high = (value / 1e9 for value in (min(readings), median(readings), max(readings)))
    return f"{middle:{form}} GB/s ({low:{form}} to {high:{form}})"


def _title(facts: Figures) -> str:
    weights = ", random weights: speed only" if facts["random_weights"] else ""
    where = facts["machine"].get("device") or facts["machine"]["cpu"]
    return (
        f"{facts['target']}{weights}. {where}, {facts['threads']} threads,"
        f" {facts['kernels']} kernels. Milliseconds; the prompt's time is included."
    )
