"""The plot of a sweep: what each recipe costs in quality for what it saves in bytes and gains in speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.report.figure import BASELINE, COMPRESSED, FAINT, ORIGINAL, SPECULATIVE, STYLE, new_figure
from compress.report.labels import place_labels
from compress.report.sweep_table import Row, SweepTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Changes of perplexity up to so many percent are drawn evenly, larger ones by their logarithm.
_EVEN = 2.0


def pareto(found: SweepTable) -> "Figure | None":
    """Change of perplexity over weights on disk and, where it was measured, over speed; dominated recipes are grey.

    None where no recipe has finished.
    """
    import matplotlib

    rows = [row for row in found.rows if row.compressed_bytes is not None and row.perplexity_change is not None]
    if not rows or found.original is None:
        return None
    timed = [row for row in rows if row.speed is not None]
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.6, columns=2 if timed else 1)
        panels = list(axes) if timed else [axes]
        left = panels[0]
        _panel(left, rows, [(row.compressed_bytes or 0) / 1e6 for row in rows], found.original.bytes / 1e6, -1)
        left.set_xlabel("weights on disk (MB); further left is better")
        left.set_ylabel("change of perplexity (%); lower is better")
        left.set_xlim(left=0)
        if any(row.dominated_by for row in rows):
            left.set_title("grey: dominated by another recipe", loc="left", fontsize=8, color=FAINT)
        if timed:
            _panel(panels[1], timed, [row.speed or 0.0 for row in timed], 1.0, 1)
            panels[1].set_xlabel("speed, over the original's; further right is better")
            panels[1].tick_params(labelleft=False)
        _scale(panels, [100 * (row.perplexity_change or 0.0) for row in rows])
        figure.draw_without_rendering()  # settles the layout: labels need to know where points come to lie
        for one, shown in zip(panels, [rows, timed], strict=False):
            grey = {row.recipe for row in shown if row.dominated_by}
            place_labels(one, grey)
    return figure


def _panel(axes: "Axes", rows: Sequence[Row], xs: Sequence[float], original: float, better: int) -> None:
    """Points, and the stairs that join those that nothing outdoes in this panel's two figures. `better`: +1, right.

    A point's gid is its recipe, and empty for the original.
    """
    ys = [100 * (row.perplexity_change or 0.0) for row in rows]
    best: list[tuple[float, float]] = []
    for x, y in sorted(zip(xs, ys, strict=True), key=lambda p: (-better * p[0], p[1])):
        if not best or y < best[-1][1]:
            best.append((x, y))
    axes.step(*zip(*best, strict=True), where="post", color=BASELINE, linewidth=1.2, zorder=1)
    axes.plot([original], [0], "D", color=ORIGINAL, markersize=5, zorder=3, gid="")
    colour = COMPRESSED if better < 0 else SPECULATIVE
    for row, x, y in zip(rows, xs, ys, strict=True):
        shown = FAINT if row.dominated_by else colour
        face = "white" if row.dominated_by else colour
        axes.plot([x], [y], "o", color=shown, markerfacecolor=face, markersize=6, zorder=2, gid=row.recipe)
    axes.axhline(0, color=ORIGINAL, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.grid()
    axes.margins(x=0.22, y=0.14)


def _scale(panels: Sequence["Axes"], changes: Sequence[float]) -> None:
    """One scale of quality for all panels: even, or logarithmic beyond the small changes where some are large."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = min(0.0, *changes), max(0.0, *changes)
    even = high <= 5 * _EVEN
    ticks = [t for t in (-2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e4, 1e5) if low <= t <= 1.5 * high]
    for axes in panels:
        if even:
            pad = 0.14 * (high - low) or 1.0
            axes.set_ylim(low - pad, high + pad)
        else:
            axes.set_yscale("symlog", linthresh=_EVEN, linscale=0.8)
            axes.set_yticks(ticks)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylim(low - 0.6, high * 1.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
