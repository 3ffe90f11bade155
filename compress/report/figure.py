"""What all plots share: colours, type, size, and how a figure becomes a file or a data URI."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour per subject, the same in every plot and on the page.
ORIGINAL, COMPRESSED, SPECULATIVE, DRAFT, BASELINE = "#64748b", "#2563eb", "#0d9488", "#a78bfa", "#cbd5e1"
INK, FAINT, GRID = "#0f172a", "#64748b", "#e2e8f0"
_WIDTH = 8.6  # inches: on the page 9 points come out as the size of its text
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "specpress",
}


def new_figure(height: float, columns: int = 1, width: float = _WIDTH) -> tuple["Figure", Any]:
    """A figure of `height` and `width` inches (as wide as the page), and its axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white")
    axes = figure.subplots(1, columns)
    return figure, axes


class Bar(NamedTuple):
    """One bar: its name before it, its figure behind it."""

    name: str
    value: float
    figure: str
    colour: str


def draw_bars(axes: "Axes", bars: Sequence[Bar], gap: float, align: str) -> None:
    """From top to bottom; figures stand `gap` of the longest behind their bars, aligned as text's `va` has it."""
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [bar.value for bar in bars], color=[bar.colour for bar in bars], height=0.62)
    longest = max(bar.value for bar in bars)
    for place, bar in zip(places, bars, strict=True):
        axes.text(bar.value + gap * longest, place, bar.figure, va=align, fontsize=9)
    axes.set_yticks(places, [bar.name for bar in bars], color=INK)
    axes.tick_params(axis="y", length=0)


def png(figure: "Figure") -> bytes:
    """The figure as a PNG of twice the page's resolution."""
    return _saved(figure, {"format": "png", "dpi": 200})


def svg(figure: "Figure") -> bytes:
    """The figure as SVG, without metadata, so that equal figures give equal bytes."""
    return _saved(figure, {"format": "svg", "metadata": dict.fromkeys(("Creator", "Date", "Format", "Type"))})


def _saved(figure: "Figure", options: dict[str, Any]) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def svg_uri(content: bytes) -> str:
    """An SVG as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(content).decode("ascii")
