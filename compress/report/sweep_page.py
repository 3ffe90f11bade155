"""sweep.md and sweep.html: the table of many recipes, with its plot."""

from typing import Any

from compress.report.figure import svg_uri
from compress.report.page import cell, fenced, render
from compress.report.sweep_table import Row, SweepTable
from compress.report.wording import NOT_MEASURED, megabytes, number, percent, times

HEADERS = (
    *("recipe", "weights", "smaller", "bits per weight", "cache per token", "perplexity", "change", "KL, nats"),
    *("same top token", "verdict", "tokens/s plain / speculative", "speed over the original's"),
)
_NOTES = (
    "Perplexity is that of held-out text, through the runtime, on each artifact read back; through the quantised cache "
    "where a recipe has one.",
    "Speed is the faster of plain and speculative decoding over the original's plain decoding in the same run, with "
    "which it was interleaved. Tokens per second of different runs say less: machines change their pace.",
    "A recipe is dominated by another that is at least as good in weights, cache, perplexity and speed, and better in "
    "one of them; single measurements decide, so a lead within their noise is none.",
)


def html(found: SweepTable, plot: bytes | None) -> str:
    """One self-contained page with the plot (SVG); recipes link to their reports beside it."""
    uri = None if plot is None else svg_uri(plot)
    return render("sweep.html.j2", {**_view(found), "plot": uri}, autoescape=True)


def markdown(found: SweepTable) -> str:
    return render("sweep.md.j2", _view(found), autoescape=False, cell=cell, fenced=fenced).strip() + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """The figures of a recipe as HEADERS has them, without its name."""
    if row.failed is not None:
        return ("–",) * (len(HEADERS) - 1)
    change = NOT_MEASURED if row.perplexity_change is None else f"{100 * row.perplexity_change:+.2f} %"
    paces = [number(pace, 0) for pace in (row.tokens_per_second, row.speculative_tokens_per_second)]
    cache = NOT_MEASURED if row.kv_bytes_per_token is None else f"{row.kv_bytes_per_token:,.0f} B"
    return (
        megabytes(row.compressed_bytes),
        NOT_MEASURED if row.ratio is None else times(row.ratio),
        "–" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}",
        cache,
        number(row.perplexity, 3),
        change,
        number(row.kl_divergence, 4),
        percent(row.top1_agreement),
        row.verdict or NOT_MEASURED,
        NOT_MEASURED if row.tokens_per_second is None else " / ".join(paces),
        NOT_MEASURED if row.speed is None else times(row.speed),
    )


def _view(found: SweepTable) -> dict[str, Any]:
    original = found.original
    first = None
    if original is not None:
        cache = "–" if original.kv_bytes_per_token is None else f"{original.kv_bytes_per_token:,.0f} B"
        first = (megabytes(original.bytes), "1.00×", "–", cache, number(original.perplexity, 3), *"–" * 5, "1.00×")
    measured = [row for row in found.rows if row.failed is None]
    return {
        "title": f"{len(found.rows)} recipes · {found.model}" if found.model else f"{len(found.rows)} recipes",
        "found": found,
        "headers": HEADERS,
        "original": first,
        "rows": [(row, cells(row)) for row in found.rows],
        "front": [row.recipe for row in measured if not row.dominated_by],
        "beaten": [row for row in measured if row.dominated_by],
        "failed": [row for row in found.rows if row.failed is not None],
        "about": [(row.recipe, row.about) for row in found.rows if row.about],
        "notes": _NOTES,
    }
