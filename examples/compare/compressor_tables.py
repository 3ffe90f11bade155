"""What compressors reached and what they took, as rows for JSON and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from excess import Comparison, Interval, Scores, compare, mean
from jobs import Done
from settings import OURS, Setting

if TYPE_CHECKING:
    from rich.console import Console

_QUALITY = [
    ("setting", "setting", "s"), ("peer", "peer", "s"), ("peer_excess", "theirs", ">s"), ("our_excess", "ours", ">s"),
    ("excess_ratio", "ours / theirs", ">s"), ("target", "target", ".2f"), ("peer_divergence", "KL theirs", ">s"),
    ("our_divergence", "KL ours", ">s"), ("divergence_ratio", "KL ratio", ">s"), ("verdict", "", "s"),
]  # fmt: skip
_TIMES = [
    ("setting", "setting", "s"), ("compressor", "compressor", "s"), ("rounds", "rounds", "d"),
    ("wall_seconds", "whole process", ".1f"), ("seconds", "compression alone", ".1f"),
    ("cpu_seconds", "processor", ".1f"), ("peak_mb", "peak MB", ".0f"),
]  # fmt: skip


@dataclass(frozen=True)
class QualityRow:
    """One setting. Figures in nats a token, ours None where we have no such recipe or were not asked."""

    setting: str
    peer: str
    target: float
    our_excess: Interval | None
    peer_excess: Interval | None
    our_divergence: Interval | None
    peer_divergence: Interval | None
    comparison: Comparison | None
    verdict: str | None


@dataclass(frozen=True)
class TimeRow:
    """One compressor in one setting: medians over rounds, seconds and bytes."""

    setting: str
    compressor: str
    rounds: int
    wall_seconds: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class TimeRatio:
    """Ours over the peer's, median over rounds of each round's ratio, with the extremes; below 1, ours is faster."""

    setting: str
    peer: str
    wall: float
    wall_min: float
    wall_max: float
    seconds: float


def quality_rows(settings: Sequence[Setting], scores: Mapping[tuple[str, str], Scores]) -> list[QualityRow]:
    """`scores` by setting and compressor."""
    rows = []
    for setting in settings:
        ours, theirs = scores.get((setting.name, OURS)), scores.get((setting.name, setting.peer))
        both = compare(ours, theirs, setting.target) if ours is not None and theirs is not None else None
        figures = {
            f"{whose}_{what}": None if one is None else mean(getattr(one, what))
            for whose, one in (("our", ours), ("peer", theirs))
            for what in ("excess", "divergence")
        }
        verdict = None if both is None else both.verdict
        rows.append(QualityRow(setting.name, setting.peer, setting.target, comparison=both, verdict=verdict, **figures))
    return rows


def time_rows(taken: Mapping[tuple[str, str], Sequence[Done]]) -> list[TimeRow]:
    """`taken` by setting and compressor, in the order of the rounds."""
    return [
        TimeRow(
            setting,
            compressor,
            len(rounds),
            median(done.wall_seconds for done in rounds),
            median(done.seconds for done in rounds),
            median(done.cpu_seconds for done in rounds),
            max(done.peak_bytes for done in rounds),
        )
        for (setting, compressor), rounds in taken.items()
    ]


def time_ratios(taken: Mapping[tuple[str, str], Sequence[Done]]) -> list[TimeRatio]:
    """For each setting that both did."""
    ratios = []
    for (setting, peer), theirs in taken.items():
        ours = taken.get((setting, OURS))
        if peer == OURS or ours is None:
            continue
        wall = [a.wall_seconds / b.wall_seconds for a, b in zip(ours, theirs, strict=True)]
        inside = [a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)]
        ratios.append(TimeRatio(setting, peer, median(wall), min(wall), max(wall), median(inside)))
    return ratios


def print_quality(console: "Console", rows: Sequence[QualityRow]) -> None:
    """One line a setting."""
    from runtime.bench.output import table

    title = "excess log-perplexity over the original, 1000 × nats a token, with 95 % intervals over windows"
    lines = [
        {"setting": row.setting, "peer": row.peer, "target": row.target, "verdict": row.verdict}
        | {
            name: _scaled(getattr(row, name))
            for name in ("peer_excess", "our_excess", "peer_divergence", "our_divergence")
        }
        | {
            name: None if row.comparison is None else _ratio(getattr(row.comparison, name))
            for name in ("excess_ratio", "divergence_ratio")
        }
        for row in rows
    ]
    console.print(table(_QUALITY, lines, title))


def _scaled(figure: Interval | None) -> str | None:
    return None if figure is None else f"{figure.value * 1e3:.2f} ± {(figure.high - figure.low) / 2 * 1e3:.2f}"


def _ratio(figure: Interval) -> str:
    return f"{figure.value:.3f} [{figure.low:.2f}, {figure.high:.2f}]"


def print_times(console: "Console", rows: Sequence[TimeRow], ratios: Sequence[TimeRatio]) -> None:
    """One line a setting and compressor, then the ratios."""
    from runtime.bench.output import table

    lines = [vars(row) | {"peak_mb": row.peak_bytes / 1e6} for row in rows]
    console.print(table(_TIMES, lines, "seconds, medians; memory, the largest"))
    for one in ratios:
        console.print(
            f"{one.setting}: ours takes {one.wall:.2f} of {one.peer}'s wall time ({one.wall_min:.2f} to"
            f" {one.wall_max:.2f}), {one.seconds:.2f} of its compression alone"
        )


def report(
    quality: Sequence[QualityRow], taken: Mapping[tuple[str, str], Sequence[Done]], settings: Sequence[Setting]
) -> dict[str, Any]:
    """What the JSON file says of both parts, and what each compressor said of itself."""
    facts = {compressor: rounds[-1].facts for (_, compressor), rounds in taken.items()}
    return {
        "compressors": facts,
        "settings": {setting.name: asdict(setting) for setting in settings},
        "quality": [asdict(row) for row in quality],
        "times": [asdict(row) for row in time_rows(taken)],
        "time_ratios": [asdict(ratio) for ratio in time_ratios(taken)],
    }
