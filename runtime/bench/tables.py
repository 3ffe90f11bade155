"""What `speculate` and `load` print."""

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


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
