"""The plots of a plan, each a self-contained SVG as a data URI: size and speed against quality, and prices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.best import bit_map
from compress.best.budgets import Budgets
from compress.report.figure import (
    COMPRESSED,
    FAINT,
    INK,
    ORIGINAL,
    SPECULATIVE,
    STYLE,
    Bar,
    draw_bars,
    new_figure,
    svg,
    svg_uri,
)
from compress.report.labels import place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
_HALF, _HEIGHT = 4.9, 3.7  # inches: two stand side by side on the page, one below the other on a narrow one
_BUDGET, _BEST, _REFUSED = "#c2410c", "#0d9488", "#c2410c"
# Where the scale of quality turns from even to logarithmic, over the budget or the winner's figure.
_EVEN = 1.5
# How much further than the points a budget may lie to be drawn as a line.
_NEAR = 0.6


@dataclass(frozen=True)
class _Mark:
    """A point of a panel. `name`: a candidate's number, "" on the front; `before`: what was predicted of it."""

    x: float
    y: float
    speed: float
    name: str = ""
    before: tuple[float, float] | None = None
    chosen: bool = False
    refused: bool = False


def all_plots(data: Data) -> dict[str, Any]:
    """fronts: two panels as data URIs with their descriptions; steps and upgrades: bars, None where there are none."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return {
            "fronts": [(svg_uri(svg(figure)), about) for figure, about in fronts(data)],
            "steps": _uri(steps(data)),
            "upgrades": _uri(upgrades(data)),
        }


def _uri(figure: "Figure | None") -> str | None:
    return None if figure is None else svg_uri(svg(figure))


def fronts(data: Data) -> list[tuple["Figure", str]]:
    """Two panels, and what each shows: sizes that have a budget (the disk where neither has), else size and speed."""
    budgets = data["budgets"]
    sizes = [name for name in ("disk", "memory") if budgets[f"{name}_bytes"] is not None] or ["disk"]
    found = [
        (_size_panel(data, name), f"Points: {name} in MB against quality; the predicted front, candidates and budgets")
        for name in sizes
    ]
    if len(found) == 1:
        found.append(
            (_speed_panel(data), "Points: tokens a second against quality; the predicted front, candidates and budgets")
        )
    return found


def _size_panel(data: Data, name: str) -> "Figure":
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    marks = _marks(data, lambda one, _: one[name] / 1e6)
    speeds = [mark.speed for mark in marks]
    low, high = min(speeds), max(speeds)
    norm = Normalize(low, high if high > low else low + 1)
    colours = LinearSegmentedColormap.from_list("speed", ["#94a3b8", "#60a5fa", "#1e3a8a"])
    figure, axes = new_figure(_HEIGHT, width=_HALF)
    _draw(axes, data, marks, lambda mark: colours(norm(mark.speed)))
    if (limit := data["budgets"][f"{name}_bytes"]) is not None:
        _vertical(axes, limit / 1e6, f"--{name} {limit / 1e6:,.4g} MB")
    axes.set_xlabel(f"{'on disk' if name == 'disk' else 'in memory'}, MB")
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02, aspect=30)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(length=0, labelsize=7.5)
    bar.ax.set_title("tokens/s", fontsize=7.5, color=FAINT, loc="left")
    _finish(figure, axes)
    return figure


def _speed_panel(data: Data) -> "Figure":
    marks = _marks(data, lambda _, speed: speed)
    figure, axes = new_figure(_HEIGHT, width=_HALF)
    _draw(axes, data, marks, lambda _: COMPRESSED)
    if (latency := data["budgets"]["latency_ms"]) is not None:
        _vertical(axes, 1e3 / latency, f"--latency {latency:g} ms")
    original = data["original"]["fastest"]["tokens_per_second"]
    left, right = axes.get_xlim()
    if original > left - _NEAR * (right - left):
        axes.plot([original], [0.0], "D", color=ORIGINAL, markersize=5, zorder=3, gid="")
    axes.set_xlabel("tokens a second")
    _finish(figure, axes)
    return figure


def _marks(data: Data, x: Callable[[Data, float], float]) -> list[_Mark]:
    """The front, then the candidates; `x` of figures and a speed."""
    budgets = Budgets.from_dict(data["budgets"])
    found = []
    for one in data["front"]:
        speed = one["pace"]["tokens_per_second"]
        found.append(_Mark(x(one, speed), _height(budgets, one["figure"]), speed))
    for number, one in enumerate(data["candidates"], 1):
        before, measured, way = one["predicted"], one["measured"], one["fastest"]
        guess = before["tokens_per_second"]
        speed = guess if way is None else way["tokens_per_second"]
        found.append(
            _Mark(
                x(measured, speed),
                _height(budgets, measured["figure"]),
                speed,
                str(number),
                (x(before, guess), _height(budgets, before["figure"])),
                one["key"] == data["winner"],
                one["broke"] is not None,
            )
        )
    return found


def _height(budgets: Budgets, figure: float) -> float:
    """A figure of quality as it is drawn: nats, or percent."""
    return figure if budgets.kl is not None else 100 * math.expm1(min(figure, 50.0))


def _draw(axes: "Axes", data: Data, marks: Sequence[_Mark], colour: Callable[[_Mark], Any]) -> None:
    """Points and the budget of quality; a point's gid is its candidate's number."""
    budgets = Budgets.from_dict(data["budgets"])
    front = [mark for mark in marks if not mark.name]
    axes.plot([m.x for m in front], [m.y for m in front], color="#94a3b8", linewidth=1.2, zorder=1)
    for mark in front:
        axes.plot([mark.x], [mark.y], "o", color=colour(mark), markersize=5, zorder=2)
    for mark in marks:
        if not mark.name:
            continue
        if mark.before is not None:
            axes.plot(*zip(mark.before, (mark.x, mark.y), strict=True), color=FAINT, linewidth=0.7, zorder=2)
        edge = _BEST if mark.chosen else _REFUSED if mark.refused else INK
        axes.plot(
            [mark.x], [mark.y], "X" if mark.refused else "s", markeredgecolor=edge,
            color="white" if mark.refused else colour(mark), markeredgewidth=2 if mark.chosen else 1.2,
            markersize=8 if mark.chosen else 6.5,
            zorder=4 if mark.chosen else 3, gid=f"{mark.name}, chosen" if mark.chosen else mark.name,
        )  # fmt: skip
    best = next(mark for mark in marks if mark.chosen)
    limit = None if budgets.figure_limit is None else _height(budgets, budgets.figure_limit)
    axes.margins(x=0.14)
    _scale(axes, [mark.y for mark in marks], limit, max(abs(best.y), 1e-6) if limit is None else limit)
    if limit is not None:
        axes.axhline(limit, color=_BUDGET, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0)
        text = f"--kl {limit:.4g}" if budgets.kl is not None else f"--quality {limit:.4g} %"
        # At the end that fewer points are near.
        left, right = axes.get_xlim()
        near = [mark.x for mark in marks if abs(mark.y - limit) < limit]
        side = 0.0 if near and sum(near) / len(near) > (left + right) / 2 else 1.0
        axes.annotate(
            text, (side, limit), xycoords=("axes fraction", "data"), xytext=(-2 if side else 2, 3),
            textcoords="offset points", ha="right" if side else "left", fontsize=7.5, color=_BUDGET,
        )  # fmt: skip
    axes.set_ylabel("KL, nats" if budgets.kl is not None else "growth of perplexity, %")
    axes.grid()


def _scale(axes: "Axes", heights: Sequence[float], limit: float | None, even: float) -> None:
    """Even up to a little over the budget, and logarithmic beyond it where points lie far above."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = min(0.0, *heights), max(even, *heights)
    if high <= 3 * even:
        pad = 0.1 * (high - low)
        axes.set_ylim(low - pad, high + pad)
        return
    unit = _EVEN * even
    axes.set_yscale("symlog", linthresh=unit, linscale=1.2)
    power = math.floor(math.log10(even))
    nice = [times * 10.0**exponent for exponent in range(power - 1, power + 6) for times in (1, 2, 5)]
    ticks = [t for t in nice if even / 3 <= t <= 1.1 * high]
    axes.set_yticks([*([-t for t in ticks if -t >= low]), 0.0, *ticks[:: max(1, len(ticks) // 6)]])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low - 0.15 * unit, high * 1.4)


def _vertical(axes: "Axes", x: float, text: str) -> None:
    """A budget as a line, or as a note at the edge where it lies far from all points."""
    left, right = axes.get_xlim()
    reach = _NEAR * (right - left)
    if left - reach <= x <= right + reach:
        axes.axvline(x, color=_BUDGET, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0)
        axes.set_xlim(min(left, x - 0.08 * (right - left)), max(right, x + 0.08 * (right - left)))
        axes.annotate(
            text, (x, 0.0), xycoords=("data", "axes fraction"), xytext=(-3, 4), textcoords="offset points",
            rotation=90, ha="right", va="bottom", fontsize=7.5, color=_BUDGET,
        )  # fmt: skip
        return
    side, words = (1.0, f"{text} →") if x > right else (0.0, f"← {text}")
    axes.annotate(
        words, (side, 0.0), xycoords="axes fraction", xytext=(-3 if side else 3, 4), textcoords="offset points",
        ha="right" if side else "left", fontsize=7.5, color=_BUDGET,
    )  # fmt: skip


def _finish(figure: "Figure", axes: "Axes") -> None:
    figure.draw_without_rendering()  # settles the layout: labels need to know where points come to lie
    place_labels(axes, frozenset())


def steps(data: Data) -> "Figure | None":
    """Bars: the least damage at other sizes on disk."""
    budgets, found = Budgets.from_dict(data["budgets"]), data["prices"]["steps"]
    if not found:
        return None
    bars = []
    for one in found:
        much = f"{one['bytes'] / 1e6:+g} MB" if one["bytes"] else "same size"
        colour = SPECULATIVE if not one["bytes"] else COMPRESSED
        bars.append(Bar(much, max(0.0, _height(budgets, one["figure"])), budgets.shown(one["figure"]), colour))
    return _bars(bars, "KL, nats" if budgets.kl is not None else "growth of perplexity, %")


def upgrades(data: Data) -> "Figure | None":
    """Bars: what a megabyte spent on each unit takes off the figure of quality."""
    budgets, found = Budgets.from_dict(data["budgets"]), data["prices"]["upgrades"]
    if not found:
        return None
    by_name = {unit["name"]: unit for unit in data["units"]}
    bars = []
    for one in found:
        unit = by_name[one["unit"]]
        much = one["per_megabyte"] if budgets.kl is not None else 100 * one["per_megabyte"]
        name = f"block {unit['block']} {bit_map.layer(unit)}"
        bars.append(Bar(name, much, f"{much:.2g}", COMPRESSED))
    return _bars(bars, f"{'nats' if budgets.kl is not None else '% of perplexity'} a megabyte, predicted")


def _bars(bars: Sequence[Bar], label: str) -> "Figure":
    figure, axes = new_figure(0.3 * len(bars) + 0.75, width=_HALF)
    draw_bars(axes, bars, 0.02, "center")
    axes.set_xlabel(label)
    longest = max(bar.value for bar in bars)
    axes.set_xlim(0, 1.35 * longest if longest > 0 else 1.0)
    axes.grid(axis="x")
    return figure
