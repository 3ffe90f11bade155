"""The names of points in a plot, placed where they cover the least."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from compress.report.figure import FAINT, INK, ORIGINAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Where a name may stand beside its point, in points: (x, y), by preference.
_NEAR = ((7, 0), (-7, 0), (6, 8), (-6, 8), (6, -8), (-6, -8), (0, 9), (0, -9))
_PLACES = (*_NEAR, *((x, y) for y in (16, -16, 26, -26) for x in (9, -9)))
_LETTER, _LINE = 5.0, 10.0  # points: about the width and height of a letter of the labels
_MISTAKEN = 25.0  # square points of overlap that standing beside another point is as bad as


def place_labels(axes: "Axes", faint: Collection[str]) -> None:
    """Each point's name, where it covers the least of points, lines of the frame and other names.

    A point is a line of one point whose gid is its name, "" for the original; the names in `faint` are grey, and those
    that are not choose their places first. The layout must be settled: where points come to lie decides.
    """
    from matplotlib.patheffects import withStroke

    scale = 72 / axes.figure.dpi
    points = {
        str(line.get_gid()): np.asarray(line.get_xydata())[0] for line in axes.lines if line.get_gid() is not None
    }
    marks = {name: axes.transData.transform(point) * scale for name, point in points.items()}
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in marks.values()]
    # From the top down.
    for name in sorted(points, key=lambda name: (name in faint, -marks[name][1])):
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
            color=INK if name and name not in faint else FAINT,
            zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="white")],
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
