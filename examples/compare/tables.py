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
    engine: Measured,
    scheme: str,
    width: int,
    samples: Sequence[Sample],
    base: float | None,
    prefill: bool = False,
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
    from rich import box
    from rich.table import Table

    table = Table(title=TITLES[compared.scheme], title_justify="left", box=box.SIMPLE)
    table.add_column("engine")
    for name in ("width", "ms median", "ms min", "tokens/s", "GB/s", "of bandwidth", "over width 1"):
        table.add_column(name, justify="right")
    for row in compared.rows:
        table.add_row(
            row.engine,
            f"prefill {row.width}" if row.prefill else str(row.width),
            f"{row.ms_median:.2f}",
            f"{row.ms_min:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.gb_per_second:.1f}",
            "-" if row.share_of_bandwidth is None else f"{row.share_of_bandwidth:.0%}",
            "-" if row.over_width_1 is None else f"{row.over_width_1:.2f}",
        )
    console.print(table)
    if compared.memory:
        low, middle, high = (f(compared.memory) / 1e9 for f in (min, median, max))
        console.print(f"memory read at {middle:.1f} GB/s ({low:.1f} to {high:.1f})")
    for engine in compared.engines:
        facts = {"weights read": f"{engine.weight_bytes / 1e6:.0f} MB"} | engine.facts
        console.print(f"{engine.name}: " + "; ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=True)
    console.print()


def print_ratios(console: "Console", found: Sequence[Ratio]) -> None:
    """Schemes down, widths across."""
    from rich import box
    from rich.table import Table

    columns = list(dict.fromkeys((ratio.prefill, ratio.width) for ratio in found))
    table = Table(title="best peer's median ms / ours (above 1: ours is faster)", title_justify="left", box=box.SIMPLE)
    table.add_column("scheme")
    for prefill, width in columns:
        table.add_column(f"prefill {width}" if prefill else f"width {width}", justify="right")
    for scheme in dict.fromkeys(ratio.scheme for ratio in found):
        cells = {(r.prefill, r.width): f"{r.ratio:.2f} ({r.best_peer})" for r in found if r.scheme == scheme}
        table.add_row(scheme, *(cells.get(column, "-") for column in columns))
    console.print(table)


def report(plan: Plan, compared: Sequence[Compared]) -> dict[str, Any]:
    """What the JSON file says of the measurement: how it went, by scheme what ran, then rows and ratios."""
    found = [row for one in compared for row in one.rows]
    return {
        "threads": plan.threads,
        "protocol": {
            "weights": "random",
            "context": plan.context,
            "prefill": plan.prefill,
            "rounds": plan.rounds,
            "prefill_rounds": plan.prefill_rounds,
            "repeats": plan.repeats,
        },
        "bandwidth": {one.scheme: median(one.memory) if one.memory else None for one in compared},
        "engines": {
            one.scheme: {engine.name: {"weight_bytes": engine.weight_bytes} | engine.facts for engine in one.engines}
            for one in compared
        },
        "rows": [asdict(row) for row in found],
        "ratios": [asdict(ratio) for ratio in ratios(found)],
    }
