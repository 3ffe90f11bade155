"""The planner against a whole grid: every choice of a smaller space made and timed, then a plan for each budget.

    .venv/bin/python examples/planner_grid.py --out runs/grid

The grid: one option for all attention layers × one for all MLPs of the built-in pair (or of --model), each compressed
and measured as a run does it, decoded by every drafter at every γ of --lengths. For each budget the grid's fastest
choices that keep it, and what `compress.best` chose within its own, far larger space, are timed again in turns. Prints
the ratio of their tokens/s, whether the plan keeps its budgets, and the share of the grid's time that planning took.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from compress import Recipe, compress
from compress.best.budgets import Budgets
from compress.best.caches import bytes_of
from compress.best.original import bytes_of_draft
from compress.best.space import Option, Unit, find_units, make_recipe
from compress.context import RunContext
from compress.pipeline.inputs import RunInputs, open_inputs
from compress.progress import silent
from compress.report.assemble import make_prompts
from compress.report.files import read_report
from compress.report.pairing import Drafting, is_tree
from compress.report.schema_speed import PLAIN
from compress.report.size import weight_bytes as files_bytes
from compress.report.timing import REPEATS, Work, time_interleaved
from runtime import Speculator, load
from runtime.model.layers import weight_bytes
from runtime.model.load import Model

OPTIONS = {
    str(option): option
    for option in (
        Option("int8-dynamic"),
        *(Option(scheme, group, "gptq") for scheme, group in (("int4", 128), ("int4", 32), ("int3", 64), ("int3", 32))),
        Option("int2", 64, "gptq"),
        *(Option(f"trellis-{bits}", method="gptq") for bits in (4, 3)),
    )
}
# What compress.best is asked for. The last two were added when nothing was changed any more.
BUDGETS: tuple[dict[str, str], ...] = (
    {"quality": "1%"},
    {"quality": "4%"},
    {"kl": "0.02"},
    {"quality": "2%", "memory": "34MB"},
    {"kl": "0.06", "disk": "9.5MB"},
    {"quality": "8%", "disk": "9MB"},
)
CONTEXT = 512
_AGAIN = 3  # of the grid's choices within a budget so many are timed again, beside the plan's
_SECONDS = 20.0

say = Console().print


@dataclass(frozen=True)
class Point:
    """A choice of the grid, measured: `rates` in tokens/s by drafter and γ."""

    attention: str
    mlp: str
    folder: str
    quality: float
    kl: float
    disk: int
    memory: int
    rates: dict[str, float]

    def keeps(self, budgets: Budgets) -> bool:
        """Whether measured figures are within all budgets."""
        figure = self.kl if budgets.kl is not None else math.log1p(self.quality)
        limits = (
            (figure, budgets.figure_limit),
            (self.disk, budgets.disk),
            (self.memory, budgets.memory),
        )
        return all(limit is None or found <= limit for found, limit in limits)

    @property
    def way(self) -> str:
        return max(self.rates, key=lambda name: self.rates[name])

    @property
    def rate(self) -> float:
        return self.rates[self.way]


@dataclass(frozen=True)
class Bench:
    """What all timings share."""

    original: Model
    draft: Model | None
    prompts: list[list[int]]
    new_tokens: int
    threads: int | None

    def ways(self, model: Model, lengths: Sequence[int]) -> dict[str, Speculator]:
        """Plain decoding and every drafter of chains at every γ."""
        drafting = Drafting(model, self.draft, threads=self.threads)
        names = [name for name in drafting.names if not is_tree(name)]
        found = {f"{name} {length}": drafting.speculator(name, length) for name in names for length in lengths}
        return {PLAIN: Speculator(model), **found}

    def rates(self, ways: dict[str, Speculator], repeats: int) -> dict[str, float]:
        timed = time_interleaved(ways, Work(self.prompts, self.new_tokens, repeats, _SECONDS), silent)
        return {name: one.decode_tokens_per_second or 0.0 for name, one in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--grid", type=Path, help="grid.json of an earlier run, whose models are taken, not made again")
    parser.add_argument("--lengths", default="1,2,4,8")
    parser.add_argument("--eval-tokens", type=int, default=16_384)
    parser.add_argument("--options", type=int, default=len(OPTIONS), help="so many of them for each kind of layer")
    parser.add_argument("--budgets", type=int, default=len(BUDGETS), help="so many of them")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    context = RunContext.of(
        Recipe.load("int8-dynamic"),
        out=asked.out / "none",
        **({"model": asked.model, "draft": asked.draft} if asked.model else {}),
        **settings(asked),
    )
    inputs = open_inputs(context)
    units = find_units(inputs.target.shapes(), inputs.structure)
    original = load(inputs.target.path, threads=asked.threads)
    draft = None if inputs.draft is None else load(inputs.draft.path, threads=asked.threads)
    prompts = make_prompts(inputs.text.corpus, original, inputs.text.windows, context.new_tokens, context.seed)
    bench = Bench(original, draft, prompts, context.new_tokens, asked.threads)
    points, grid_seconds = measured_before(asked.grid) if asked.grid else measure_grid(bench, units, inputs, asked)
    say(f"grid: {len(points)} models × {len(points[0].rates)} ways of decoding in {grid_seconds:.0f} s")
    rows = [against_grid(bench, points, dict(budget), grid_seconds, asked) for budget in BUDGETS[: asked.budgets]]
    show(rows, len(points), grid_seconds)
    report = {"grid_seconds": grid_seconds, "points": [asdict(point) for point in points], "budgets": rows}
    (asked.out / "grid.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    return {"eval_tokens": asked.eval_tokens, "threads": asked.threads, "baselines": "none", "speed": False}


def measured_before(grid: Path) -> tuple[list[Point], float]:
    """The points of an earlier grid, whose models still lie beside the file, and the seconds that it took."""
    data = json.loads(grid.read_text(encoding="utf-8"))
    points = [Point(**{**one, "folder": str((grid.parent / one["folder"]).resolve())}) for one in data["points"]]
    return points, float(data["grid_seconds"])


def measure_grid(
    bench: Bench, units: tuple[Unit, ...], inputs: RunInputs, asked: argparse.Namespace
) -> tuple[list[Point], float]:
    """Every choice compressed, measured, and decoded in every way; and the seconds that all of it took."""
    began = perf_counter()
    lengths = [int(length) for length in asked.lengths.split(",")]
    beside = bytes_of_draft(bench.draft, CONTEXT, 1) + bytes_of(bench.original, CONTEXT)[0]
    points = []
    tried = list(OPTIONS)[: asked.options]
    # One model holds what is of one library.
    pairs = [pair for pair in itertools.product(tried, tried) if len({OPTIONS[one].library for one in pair}) == 1]
    for number, (attention, mlp) in enumerate(pairs):
        assignment = {
            unit.name: fitting(unit, OPTIONS[attention if ".self_attn" in unit.name else mlp]) for unit in units
        }
        folder = asked.out / f"grid-{number}"
        artifact = compress(asked.model, make_recipe(units, assignment, "grid", {}), folder, **settings(asked))
        quality = read_report(artifact.path).quality
        assert quality is not None and quality.kl_divergence is not None and quality.perplexity.ci95 is not None
        model = load(artifact.model, threads=asked.threads)
        decoder: Any = model.decoder
        points.append(
            Point(
                attention,
                mlp,
                folder.name,
                quality.perplexity.ci95.ratio[1] - 1,
                float(quality.kl_divergence.mean),
                files_bytes(artifact.model),
                beside + weight_bytes(decoder.parts),
                bench.rates(bench.ways(model, lengths), REPEATS),
            )
        )
        one = points[-1]
        say(
            f"{number + 1:3d}  {attention} / {mlp}: {100 * one.quality:+.2f} %, KL {one.kl:.4f}, "
            f"{one.disk / 1e6:.2f} MB, {one.memory / 1e6:.2f} MB in memory, {one.rate:.0f} tokens/s by {one.way}"
        )
    return points, perf_counter() - began


def fitting(unit: Unit, option: Option) -> Option:
    """The option; a finer group where its own does not divide the unit's rows."""
    same = (one for one in unit.options if one.bits == option.bits and one.library == option.library)
    return option if option in unit.options else next(same)


def against_grid(
    bench: Bench, points: Sequence[Point], budget: dict[str, str], grid_seconds: float, asked: argparse.Namespace
) -> dict[str, Any]:
    """A plan for a budget, beside the grid's fastest choices within it."""
    words = " ".join(f"--{name} {value}" for name, value in budget.items())
    budgets = Budgets.parse(
        budget.get("quality"),
        float(budget["kl"]) if "kl" in budget else None,
        budget.get("disk"),
        budget.get("memory"),
        None,
        None,
        "speed",
    )
    out = asked.out / f"best-{len(list(asked.out.glob('best-*')))}"
    command = [sys.executable, "-m", "compress.best", "--out", str(out), "--context", str(CONTEXT), *words.split()]
    command += ["--eval-tokens", str(asked.eval_tokens)]
    command += ["--model", asked.model] if asked.model else []
    command += ["--draft", asked.draft] if asked.draft else []
    command += ["--threads", str(asked.threads)] if asked.threads else []
    began = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr.strip()}")
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    winner = next(one for one in plan["candidates"] if one["key"] == plan["winner"])
    kept = sorted((point for point in points if point.keeps(budgets)), key=lambda point: -point.rate)[:_AGAIN]
    ways = {}
    model = load(out / "best" / "model", threads=asked.threads)
    drafter, length = winner["fastest"]["drafter"], winner["fastest"]["draft_length"]
    drafting = Drafting(model, bench.draft, threads=asked.threads)
    ways["plan"] = Speculator(model) if drafter == PLAIN else drafting.speculator(drafter, length)
    for point in kept:
        found = bench.ways(load(asked.out / point.folder / "model", threads=asked.threads), [_length(point.way)])
        ways[f"{point.attention} / {point.mlp}: {point.way}"] = found[point.way]
    rates = bench.rates(ways, 9)
    best = max((name for name in rates if name != "plan"), key=lambda name: rates[name], default=None)
    row = {
        "budget": words,
        "grid_best": best,
        "grid_rate": None if best is None else rates[best],
        "plan_rate": rates["plan"],
        "plan_drafter": drafter if length is None else f"{drafter} {length}",
        "holds": winner["broke"] is None,
        "disk": winner["measured"]["disk"],
        "memory": winner["measured"]["memory"],
        "figure": winner["measured"]["figure"],
        "seconds": seconds,
        "share": seconds / grid_seconds,
    }
    say(row)
    return row


def _length(way: str) -> int:
    return int(way.rpartition(" ")[2]) if way != PLAIN else 1


def show(rows: Sequence[dict[str, Any]], models: int, grid_seconds: float) -> None:
    table = Table(title=f"compress.best beside a grid of {models} models")
    for name in (
        "budget",
        "grid's fastest",
        "tokens/s",
        "the plan's",
        "ratio",
        "budgets hold",
        "share of the grid's time",
    ):
        table.add_column(name)
    ratios = []
    for row in rows:
        ratio = None if row["grid_rate"] is None else row["plan_rate"] / row["grid_rate"]
        ratios += [] if ratio is None else [ratio]
        table.add_row(
            row["budget"],
            row["grid_best"] or "none within it",
            "–" if row["grid_rate"] is None else f"{row['grid_rate']:.0f}",
            f"{row['plan_rate']:.0f} ({row['plan_drafter']})",
            "–" if ratio is None else f"{ratio:.3f}",
            "yes" if row["holds"] else "NO",
            f"{100 * row['share']:.0f} %",
        )
    say(table)
    total = sum(row["seconds"] for row in rows)
    if ratios:
        say(f"least ratio {min(ratios):.3f}, geometric mean {geometric_mean(ratios):.3f}")
    say(f"all plans together took {100 * total / grid_seconds:.0f} % of the grid's {grid_seconds:.0f} s")


if __name__ == "__main__":
    main()
