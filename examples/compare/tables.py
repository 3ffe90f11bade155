"""What was measured, as rows for JSON and as tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from catalogue import OURS, TITLES
from drive import Measured, Plan

from runtime.bench.measure import Sample

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = [
    ("engine", "engine", "s"), ("width", "width", ">s"), ("ms_median", "ms median", ".2f"), ("ms_min", "ms min", ".2f"),
    ("tokens_per_second", "tokens/s", ".1f"), ("gb_per_second", "GB/s", ".1f"),
    ("share_of_bandwidth", "of bandwidth", ".0%"), ("over_width_1", "over width 1", ".2f"),
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One engine at one width; `prefill` marks the forward whose last row alone has logits.

    gb_per_second is the weights' bytes over the median time, share_of_bandwidth the median share that the bytes per
    second have of the memory's reading speed around them (None where nothing measured it), over_width_1 the median over
    that at width 1 (None where that was not measured, and for prefill).
    """

    engine: str
    scheme: str
    width: int
    prefill: bool
    ms_median: float
    ms_min: float
    tokens_per_second: float
    gb_per_second: float
    share_of_bandwidth: float | None
    over_width_1: float | None


@dataclass(frozen=True)
class Ratio:
    """Best peer's median over ours: above 1, ours is the faster."""

    scheme: str
    width: int
    prefill: bool
    best_peer: str
    ratio: float


@dataclass(frozen=True)
class Compared:
    """One scheme: readings of the memory's speed in bytes per second, what each engine took, and that as rows."""

    scheme: str
    memory: tuple[float, ...]
    engines: tuple[Measured, ...]
    rows: tuple[Row, ...]


def rows(scheme: str, found: Sequence[Measured], plan: Plan) -> list[Row]:
    """Engine by engine: the widths, then the prefill."""
    out = []
    for engine in found:
        base = median(s.seconds for s in engine.forwards[1]) * 1e3 if engine.forwards.get(1) else None
        for width, samples in engine.forwards.items():
            out.append(_row(engine, scheme, width, samples, base))
        if engine.prefills:
            out.append(_row(engine, scheme, plan.prefill, engine.prefills, None, prefill=True))
    return out


def _row(
    engine: Measured, scheme: str, width: int, samples: Sequence[Sample], base: float | None, prefill: bool = False
) -> Row:
    taken = [sample.seconds * 1e3 for sample in samples]
    ms = median(taken)
    shares = [engine.weight_bytes / s.seconds / s.bandwidth for s in samples if s.bandwidth is not None]
    speed = engine.weight_bytes / ms * 1e3
    return Row(
        engine=engine.name,
        scheme=scheme,
        width=width,
        prefill=prefill,
        ms_median=ms,
        ms_min=min(taken),
        tokens_per_second=width / ms * 1e3,
        gb_per_second=speed / 1e9,
        share_of_bandwidth=median(shares) if shares else None,
        over_width_1=None if base is None else ms / base,
    )


def ratios(all_rows: Sequence[Row]) -> list[Ratio]:
    """For each of our rows, the fastest other engine of the same scheme and work."""
    out = []
    for ours in (row for row in all_rows if row.engine == OURS.name):
        same = (ours.scheme, ours.width, ours.prefill)
        peers = [r for r in all_rows if r.engine != OURS.name and (r.scheme, r.width, r.prefill) == same]
        if peers:
            best = min(peers, key=lambda row: row.ms_median)
            out.append(Ratio(*same, best_peer=best.engine, ratio=best.ms_median / ours.ms_median))
    return out


def print_scheme(console: "Console", compared: Compared) -> None:
    """One line per engine and width, and beneath what the engines say of themselves."""
    from runtime.bench.output import table

    lines = [vars(row) | {"width": f"{'prefill ' if row.prefill else ''}{row.width}"} for row in compared.rows]
    console.print(table(_COLUMNS, lines, TITLES[compared.scheme]))
    if compared.memory:
        low, middle, high = (f(compared.memory) / 1e9 for f in (min, median, max))
        console.print(f"memory read at {middle:.1f} GB/s ({low:.1f} to {high:.1f})")
    for engine in compared.engines:
        facts = {"weights read": f"{engine.weight_bytes / 1e6:.0f} MB"} | engine.facts
        console.print(f"{engine.name}: " + "; ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=True)
    console.print()


def print_ratios(console: "Console", found: Sequence[Ratio]) -> None:
    """Schemes down, widths across."""
    from runtime.bench.output import table

    columns = [("scheme", "scheme", "s")]
    lines: dict[str, dict[str, str]] = {}
    for one in found:
        work = f"{'prefill' if one.prefill else 'width'} {one.width}"
        columns += [] if (work, work, ">s") in columns else [(work, work, ">s")]
        lines.setdefault(one.scheme, {"scheme": one.scheme})[work] = f"{one.ratio:.2f} ({one.best_peer})"
    title = "best peer's median ms / ours (above 1: ours is faster)"
    console.print(table(columns, list(lines.values()), title))


def report(plan: Plan, compared: Sequence[Compared]) -> dict[str, Any]:
    """What the JSON file says of the measurement: how it went, by scheme what ran, then rows and ratios."""
    found = [row for one in compared for row in one.rows]
    return {
        "threads": plan.threads,
        "protocol": {"weights": "random"}
        | {key: getattr(plan, key) for key in ("context", "prefill", "rounds", "prefill_rounds", "repeats")},
        "bandwidth": {one.scheme: median(one.memory) if one.memory else None for one in compared},
        "engines": {
            one.scheme: {engine.name: {"weight_bytes": engine.weight_bytes} | engine.facts for engine in one.engines}
            for one in compared
        },
        "rows": [asdict(row) for row in found],
        "ratios": [asdict(ratio) for ratio in ratios(found)],
    }
