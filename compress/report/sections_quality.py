"""Tables of quality that are there where they were asked for: long contexts, and tasks of lm-eval."""

from collections.abc import Sequence

from compress.quality.figures import LongContext, TaskFigures
from compress.report.sections_speed import Row, Section, Table
from compress.report.wording import number


def tasks(found: Sequence[TaskFigures]) -> Section:
    """Every metric of both models, with flips where samples are right or wrong."""
    rows: list[Row] = []
    for one in found:
        error = "" if one.error is None else f" ± {one.error:.4f}"
        flips = "–" if one.lost is None or one.won is None else f"{one.lost:,} / {one.won:,}"
        p = "–" if one.p_value is None else number(one.p_value, 3)
        rows.append(
            (one.task, one.metric, f"{one.samples:,}", f"{one.original:.4f}{error}", f"{one.compressed:.4f}", flips, p)
        )
    headers = ("task", "metric", "samples", "original", "compressed", "lost / won", "McNemar's exact p")
    return Section("Tasks", "", "", ["Tasks of lm-eval on both models, through the runtime."], [Table(headers, rows)])


def long_contexts(found: LongContext) -> Section:
    """Perplexity by position, and values found again by length of the text; a line for each model and cache."""
    ran = [row for row in found.rows if row.why is None]
    names = [f"{row.model}, {row.cache}" for row in ran]
    buckets = [f"{one.first:,}–{one.last:,}" for one in ran[0].buckets]
    positions: list[Row] = [
        (name, *(number(one.perplexity, 3) for one in row.buckets)) for name, row in zip(names, ran, strict=True)
    ]
    lengths = list(dict.fromkeys(one.length for one in ran[0].needles))
    again: list[Row] = []
    for name, row in zip(names, ran, strict=True):
        cells = []
        for length in lengths:
            mine = [one for one in row.needles if one.length == length]
            mean = sum(one.log_likelihood for one in mine) / len(mine)
            cells.append(f"{sum(one.found for one in mine)} of {sum(one.tries for one in mine)} ({mean:.2f})")
        again.append((name, *cells))
    text = [
        f"{found.windows} windows of {found.length:,} tokens. A needle is a line with a number at 10, 50 or 90 % of a "
        "text that ends with the question for it; found is a number whose every token is the most probable one. In "
        "brackets its mean log-likelihood, nats a token."
    ]
    text += [f"{row.model}, {row.cache}: not run: {row.why}" for row in found.rows if row.why is not None]
    tables = [
        Table(("perplexity at positions", *buckets), positions, wide=True),
        Table(("needles found", *(f"{length:,} tokens" for length in lengths)), again, wide=True),
    ]
    return Section("Long contexts", "", "", text, tables)
