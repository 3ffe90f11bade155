"""Many reports of one model in one table: size, quality and speed of each recipe, and which ones another outdoes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from compress.errors import UserError
from compress.report.schema import Report
from compress.report.verdict_words import short

SCHEMA = 1
# The same original on the same text: its perplexity must come out alike in every report, but for foreign kernels.
_SAME = 1e-4

# Figures that are compared, each the better the smaller; None where it was not measured.
Point = tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """One recipe, of its report. None: not measured there; all of them where the run failed.

    perplexity_change  compressed / original − 1, through the recipe's cache where it quantises that; ci95 with it.
    speed              the faster of plain and speculative decoding, in tokens a second, over plain decoding of the
                       original in the same run: only such ratios can be compared between runs, because machines change
                       their pace from minute to minute.
    dominated_by       recipes that are at least as good in size, cache, perplexity and speed, and better in one.
    verdict            better, same, worse or cannot tell, in a few words.
    failed             why there is no report.
    """

    recipe: str
    about: str
    compressed_bytes: int | None = None
    ratio: float | None = None
    bits_per_weight: float | None = None
    kv_bytes_per_token: float | None = None
    perplexity: float | None = None
    perplexity_change: float | None = None
    ci95: tuple[float, float] | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    verdict: str | None = None
    speed: float | None = None
    tokens_per_second: float | None = None
    speculative_tokens_per_second: float | None = None
    dominated_by: tuple[str, ...] = ()
    failed: str | None = None

    @property
    def point(self) -> Point:
        """What the recipe is compared by."""
        faster = None if self.speed is None else -self.speed
        return self.compressed_bytes, self.kv_bytes_per_token, self.perplexity_change, faster


@dataclass(frozen=True)
class Original:
    """What all recipes began with."""

    bytes: int
    kv_bytes_per_token: float | None
    perplexity: float | None


@dataclass(frozen=True)
class SweepTable:
    """All recipes, in the order in which they were asked for. `original` is None while nothing has finished."""

    command: str
    model: str | None
    draft: str | None
    text: str | None
    machines: tuple[str, ...]
    original: Original | None
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for sweep.json."""
        return {"schema": SCHEMA, **asdict(self)}


def sweep_table(command: str, found: Mapping[str, Report | str]) -> SweepTable:
    """The table of recipes, by name: each one's report, or the sentence that says why there is none.

    Raises UserError where two reports are not of the same model and text.
    """
    reports = {name: report for name, report in found.items() if isinstance(report, Report)}
    for name, other in reports.items():
        first_name, first = next(iter(reports.items()))
        if what := _difference(first, other):
            raise UserError(
                f"{name}: expected a report on the same {what} as {first_name}'s, found another: delete its folder, "
                "or do all of them again with --force"
            )
    made = [_row(name, report) for name, report in found.items()]
    beaten = dominated([row.point for row in made])
    rows = tuple(
        replace(row, dominated_by=tuple(made[i].recipe for i in better))
        for row, better in zip(made, beaten, strict=True)
    )
    if not reports:
        return SweepTable(command, None, None, None, (), None, rows)
    first = next(iter(reports.values()))
    size, quality = first.size, first.quality
    text = f"{quality.protocol.tokens:,} held-out tokens of {quality.corpus.name}"
    machines = dict.fromkeys(f"{r.machine.cpu}, {r.machine.instruction_path}" for r in reports.values())
    original = Original(size.original_bytes, size.kv_bytes_per_token.original, quality.perplexity.original)
    return SweepTable(command, first.model, first.draft, text, tuple(machines), original, rows)


def dominated(points: Sequence[Point]) -> list[tuple[int, ...]]:
    """For each point the indices of those that outdo it: nowhere worse, and better in at least one figure.

    A figure that either lacks is not compared; points that share none do not outdo each other.
    """
    return [tuple(i for i, other in enumerate(points) if _outdoes(other, point)) for point in points]


def _outdoes(one: Point, other: Point) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _row(name: str, report: Report | str) -> Row:
    if isinstance(report, str):
        return Row(name, "", failed=report)
    size, quality, speed = report.size, report.quality, report.speed
    found = quality.perplexity
    # A recipe that quantises the cache is judged by what the model says with that cache.
    perplexity = quality.kv_perplexity or found.compressed
    interval = found.ci95 if perplexity == found.compressed else None
    start, plain, speculative = (
        way.tokens_per_second if way else None for way in (speed.original, speed.compressed, speed.speculative)
    )
    best = max((pace for pace in (plain, speculative) if pace is not None), default=None)
    return Row(
        recipe=name,
        about=report.asked.recipe.get("about", ""),
        compressed_bytes=size.compressed_bytes,
        ratio=size.ratio,
        bits_per_weight=size.bits_per_weight,
        kv_bytes_per_token=size.kv_bytes_per_token.compressed,
        perplexity=perplexity,
        perplexity_change=perplexity / found.original - 1 if perplexity and found.original else None,
        ci95=None if interval is None else (interval.ratio[0] - 1, interval.ratio[1] - 1),
        kl_divergence=None if quality.kl_divergence is None else quality.kl_divergence.mean,
        top1_agreement=quality.top1_agreement,
        verdict=None if quality.verdict is None else short(quality.verdict),
        speed=None if best is None or start is None else best / start,
        tokens_per_second=plain,
        speculative_tokens_per_second=speculative,
    )


def _difference(first: Report, other: Report) -> str | None:
    """In what the reports differ that must be the same, or None."""
    if first.quality.corpus.sha256 != other.quality.corpus.sha256:
        return "text"
    windows = [(r.quality.protocol.window, r.quality.protocol.tokens) for r in (first, other)]
    if windows[0] != windows[1]:
        return "windows"
    a, b = (r.quality.perplexity.original or 0.0 for r in (first, other))
    same = first.size.original_bytes == other.size.original_bytes and abs(a - b) <= _SAME * a
    return None if same else "original model"
