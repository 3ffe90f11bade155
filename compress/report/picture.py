"""A report as one picture, for a README: size, quality and speed side by side, a figure above each plot.

python -m compress.report.picture runs/nf4 --out docs/report.svg
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from compress.report.schema import Report

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_WIDTH, _HEIGHT = 9.0, 3.3  # inches: 900 pixels wide at 100 a inch, where its text is 10 to 13 pixels high
_GOOD, _BAD = "#0f766e", "#b91c1c"
_MIDDLE = " · "
_LEFTS = (0.025, 0.355, 0.685)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="File to write: .svg or .png.")] = Path("report.svg"),
) -> None:
    """Draws a run's report as one light picture."""
    with without_traceback(USER_ERRORS):
        from compress.artifact.files import write_atomic
        from compress.report.figure import png, svg
        from compress.report.files import read_report

        writers = {".svg": svg, ".png": png}
        if out.suffix not in writers:
            raise UserError(f"--out: expected a name that ends in .svg or .png, found {out.name}: correct it")
        figure = draw(read_report(run))
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, writers[out.suffix](figure))
        typer.echo(f"Picture: {out}")


def draw(report: "Report") -> "Figure":
    """The picture; a part that was not measured says why instead of its plot."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from compress.report.figure import FAINT, INK, STYLE
    from compress.report.wording import headlines

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white")
        FigureCanvasAgg(figure)  # a canvas of its own: no display, no global backend
        figure.text(0.025, 0.925, f"{report.recipe}{_MIDDLE}{report.model}", fontsize=13, fontweight="bold", color=INK)
        figure.text(0.975, 0.93, report.machine.cpu, fontsize=8.5, color=FAINT, ha="right")
        parts = zip(_LEFTS, headlines(report), (_size, _quality, _speed), strict=True)
        for left, headline, measured in parts:
            colour = {"good": _GOOD, "bad": _BAD}.get(headline.tone, FAINT)
            figure.text(left, 0.745, headline.value, fontsize=20, fontweight="bold", color=colour)
            figure.text(left, 0.68, headline.label, fontsize=9.5, color=FAINT)
            bars, lines = measured(report)
            if not bars:
                lines = textwrap.wrap(headline.caption, 46, break_on_hyphens=False)
            else:
                height = 0.115 * len(bars)
                _draw(figure.add_axes((left + 0.1, 0.635 - height, 0.19, height)), bars)
            figure.text(left, 0.235, "\n".join(lines), fontsize=8, color=FAINT, va="top", linespacing=1.6)
    return figure


class Bar(NamedTuple):
    """One bar: its name before it, its figure behind it."""

    name: str
    value: float
    figure: str
    colour: str


# Bars, and lines of text below them; no bars where nothing was measured.
Column = tuple[list[Bar], list[str]]


def _draw(axes: "Axes", bars: "Sequence[Bar]") -> None:
    """From top to bottom, as high each as in the other plots."""
    from compress.report.figure import INK

    longest = max(bar.value for bar in bars)
    for place, bar in enumerate(bars):
        axes.barh(-place, bar.value, color=bar.colour, height=0.62)
        axes.text(bar.value + 0.03 * longest, -place, bar.figure, va="center_baseline", fontsize=9, color=INK)
    axes.set_yticks([-place for place in range(len(bars))], [bar.name for bar in bars], color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.set_xlim(0, (1 + 0.05 * max(len(bar.figure) for bar in bars)) * longest)  # with room for the figures
    axes.set_ylim(0.5 - len(bars), 0.5)
    axes.spines["bottom"].set_visible(False)


def _size(report: "Report") -> Column:
    from compress.report.figure import COMPRESSED, DRAFT, ORIGINAL
    from compress.report.wording import megabytes

    size = report.size
    parts = (
        ("original", size.original_bytes, ORIGINAL),
        ("compressed", size.compressed_bytes, COMPRESSED),
        ("draft", size.draft_bytes, DRAFT),
    )
    bars = [Bar(name, value, megabytes(value), colour) for name, value, colour in parts if value is not None]
    lines = ["weights on disk"]
    if size.bits_per_weight is not None:
        lines.append(f"{size.bits_per_weight:.2f} bits per quantised weight")
    if (cache := size.kv_bytes_per_token).original and cache.compressed and cache.original != cache.compressed:
        lines.append(f"cache per token {cache.original:,} to {cache.compressed:,} bytes")
    return bars, lines


def _quality(report: "Report") -> Column:
    from compress.report.figure import COMPRESSED, ORIGINAL

    quality, found = report.quality, report.quality.perplexity
    parts = (("original", found.original, ORIGINAL), ("compressed", found.compressed, COMPRESSED))
    bars = [Bar(name, value, f"{value:.2f}", colour) for name, value, colour in parts if value is not None]
    lines = [f"perplexity of {quality.protocol.tokens:,} held-out tokens"]
    if found.ci95 is not None:
        low, high = (100 * (bound - 1) for bound in found.ci95.ratio)
        lines.append(f"95 % interval of the change {low:+.2f} to {high:+.2f} %")
    if quality.kl_divergence is not None and quality.top1_agreement is not None:
        top = f"same top token {100 * quality.top1_agreement:.1f} %"
        lines.append(f"KL {quality.kl_divergence.mean:.4f} nats, {top}")
    return bars, lines


def _speed(report: "Report") -> Column:
    from compress.report.figure import COMPRESSED, ORIGINAL, SPECULATIVE

    speed, lossless = report.speed, report.lossless
    ways = (("original", ORIGINAL), ("compressed", COMPRESSED), ("speculative", SPECULATIVE))
    bars = [
        Bar("+ speculation" if name == "speculative" else name, pace, f"{pace:,.0f}", colour)
        for name, colour in ways
        if (pace := speed.pace(name))
    ]
    lines = [f"tokens per second, greedy, {speed.threads} {'thread' if speed.threads == 1 else 'threads'}"]
    if speed.acceptance_rate is not None and speed.tokens_per_round is not None:
        lines.append(f"acceptance α {speed.acceptance_rate:.2f}, {speed.tokens_per_round:.2f} tokens a round")
    if lossless.tokens_compared is not None:
        lines.append(f"{lossless.mismatches:,} of {lossless.tokens_compared:,} tokens differ from plain decoding")
    return bars, lines


if __name__ == "__main__":
    app()
