"""A report as one picture, for a README: size, quality and speed side by side, a figure above each plot."""

import textwrap
from typing import TYPE_CHECKING

from compress.report.figure import COMPRESSED, FAINT, INK, ORIGINAL, STYLE, Bar, draw_bars
from compress.report.plots import paces, weights
from compress.report.schema import Report
from compress.report.wording import change_interval, headlines, nats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 9.0, 3.3  # inches: 900 pixels wide at 100 a inch, where its text is 10 to 13 pixels high
_GOOD, _BAD = "#0f766e", "#b91c1c"
_MIDDLE = " · "
_LEFTS = (0.025, 0.355, 0.685)


def draw(report: Report) -> "Figure":
    """The picture; a part that was not measured says why instead of its plot."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white")
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


# Bars, and lines of text below them; no bars where nothing was measured.
Column = tuple[list[Bar], list[str]]


def _draw(axes: "Axes", bars: list[Bar]) -> None:
    """As high each as in the other plots, without a scale."""
    draw_bars(axes, bars, 0.03, "center_baseline")
    axes.set_xticks([])
    # With room for the figures.
    axes.set_xlim(0, (1 + 0.05 * max(len(bar.figure) for bar in bars)) * max(bar.value for bar in bars))
    axes.set_ylim(-0.5, len(bars) - 0.5)
    axes.spines["bottom"].set_visible(False)


def _size(report: Report) -> Column:
    size = report.size
    lines = ["weights on disk"]
    if size.bits_per_weight is not None:
        lines.append(f"{size.bits_per_weight:.2f} bits per quantised weight")
    if (cache := size.kv_bytes_per_token).original and cache.compressed and cache.original != cache.compressed:
        lines.append(f"cache per token {cache.original:,} to {cache.compressed:,} bytes")
    return weights(size), lines


def _quality(report: Report) -> Column:
    quality, found = report.quality, report.quality.perplexity
    parts = (("original", found.original, ORIGINAL), ("compressed", found.compressed, COMPRESSED))
    bars = [Bar(name, value, f"{value:.2f}", colour) for name, value, colour in parts if value is not None]
    lines = [f"perplexity of {quality.protocol.tokens:,} held-out tokens"]
    if found.ci95 is not None:
        lines.append(f"95 % interval of the change {change_interval(found.ci95)}")
    if quality.kl_divergence is not None and quality.top1_agreement is not None:
        top = f"same top token {100 * quality.top1_agreement:.1f} %"
        lines.append(f"KL {nats(quality.kl_divergence.mean)} nats, {top}")
    return bars, lines


def _speed(report: Report) -> Column:
    speed, lossless = report.speed, report.lossless
    lines = [f"tokens per second, greedy, {speed.threads} {'thread' if speed.threads == 1 else 'threads'}"]
    if speed.drafter is not None and not speed.pays:
        lines.append("speculation does not pay on this machine")
    elif speed.acceptance_rate is not None and speed.tokens_per_round is not None:
        lines.append(f"drafter {speed.drafter}, the fastest of those timed")
        lines.append(f"acceptance α {speed.acceptance_rate:.2f}, {speed.tokens_per_round:.2f} tokens a round")
    if lossless.tokens_compared is not None:
        lines.append(f"{lossless.mismatches:,} of {lossless.tokens_compared:,} tokens differ from plain decoding")
    return paces(speed, "+ speculation", 0), lines
