"""The plot of a sweep: what each recipe costs in quality for what it saves in bytes and gains in speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compress.report.figure import BASELINE, COMPRESSED, FAINT, INK, ORIGINAL, SPECULATIVE, STYLE, new_figure
from compress.report.sweep_table import Row, SweepTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Changes of perplexity up to so many percent are drawn evenly, larger ones by their logarithm.
_EVEN = 2.0
# Where a name may stand beside its point, in points: (x, y), by preference.
_NEAR = ((7, 0), (-7, 0), (6, 8), (-6, 8), (6, -8), (-6, -8), (0, 9), (0, -9))
_PLACES = (*_NEAR, *((x, y) for y in (16, -16, 26, -26) for x in (9, -9)))
_LETTER, _LINE = 5.0, 10.0  # points: about the width and height of a letter of the labels
_MISTAKEN = 25.0  # square points of overlap that standing beside another point is as bad as


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
            _names(one, shown)
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


def _names(axes: "Axes", rows: Sequence[Row]) -> None:
    """Each point's name, where it covers the least of points, lines of the frame and other names."""
    scale = 72 / axes.figure.dpi
    points = {
        str(line.get_gid()): np.asarray(line.get_xydata())[0] for line in axes.lines if line.get_gid() is not None
    }
    marks = {name: axes.transData.transform(point) * scale for name, point in points.items()}
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in marks.values()]
    grey = {row.recipe: bool(row.dominated_by) for row in rows}
    # Names of recipes that count choose first, from the top down.
    for name in sorted(points, key=lambda name: (grey.get(name, False), -marks[name][1])):
        x, y = marks[name]
        text = name or "original"
        boxes = [_box(x + dx, y + dy, dx, _LETTER * len(text)) for dx, dy in _PLACES]
        others = [mark for other, mark in marks.items() if other != name]
        costs = [
            sum(_overlap(box, other) for other in taken)
            + 3 * ((box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, inside))
            # Points right beside a label might be taken for what it names.
            + _MISTAKEN * sum(box[0] - _LINE < x < box[2] + _LINE and box[1] - 2 < y < box[3] + 2 for x, y in others)
            for box in boxes
        ]
        chosen = costs.index(min(costs))
        taken.append(boxes[chosen])
        dx, dy = _PLACES[chosen]
        label = axes.annotate(
            text,
            tuple(points[name]),
            xytext=(dx, dy),
            textcoords="offset points",
            ha="center" if dx == 0 else "left" if dx > 0 else "right",
            va="center",
            fontsize=8,
            color=INK if name and not grey[name] else FAINT,
            zorder=4,
            # A line leads from a name that had to move away.
            arrowprops=None if (dx, dy) in _NEAR else {"arrowstyle": "-", "color": ORIGINAL, "lw": 0.5, "shrinkB": 3},
        )
        label.set_in_layout(False)


Box = tuple[float, float, float, float]


def _box(x: float, y: float, dx: float, width: float) -> Box:
    """What a label takes whose anchor is (x, y)."""
    left = x - width / 2 if dx == 0 else x if dx > 0 else x - width
    return left, y - _LINE / 2, left + width, y + _LINE / 2


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
