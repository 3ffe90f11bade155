"""The report's plots, each a self-contained SVG as a data URI: bars of size and speed, intervals of quality, acceptance
by position, errors of layers, losses of training."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.report.figure import (
    BASELINE,
    COMPRESSED,
    DRAFT,
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
from compress.report.schema import Report, Size
from compress.report.schema_speed import Speed
from compress.report.wording import megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 3  # stages whose training is drawn
_KINDS = ("#2563eb", "#16a34a", "#d97706", "#7c3aed", "#dc2626", "#0f172a", "#ec4899", "#06b6d4", "#92400e", "#a3e635")
_ORDER = ("q", "k", "v", "qkv", "c_attn", "o", "gate", "up", "gate_up", "c_fc", "down")


def all_plots(report: Report) -> dict[str, str]:
    """Name to data URI of each plot whose figures are there: size, quality, speed, acceptance, layers, training."""
    import matplotlib

    makers = {
        "size": size_bars,
        "quality": perplexity_interval,
        "speed": speed_bars,
        "acceptance": acceptance_by_position,
        "layers": layer_errors,
        "training": loss_curves,
    }
    with matplotlib.rc_context(STYLE):
        figures = {name: make(report) for name, make in makers.items()}
        return {name: svg_uri(svg(figure)) for name, figure in figures.items() if figure is not None}


def size_bars(report: Report) -> "Figure":
    """Weights on disk, in MB: original, compressed, draft."""
    bars = weights(report.size)
    figure, axes = new_figure(0.42 * len(bars) + 0.75)
    _horizontal(axes, bars)
    axes.set_xlabel("weights on disk (MB)")
    return figure


def weights(size: Size) -> list[Bar]:
    """The bars of size, in MB."""
    parts = (
        ("original", size.original_bytes, ORIGINAL),
        ("compressed", size.compressed_bytes, COMPRESSED),
        ("draft", size.draft_bytes, DRAFT),
    )
    return [Bar(name, value / 1e6, megabytes(value), colour) for name, value, colour in parts if value is not None]


def perplexity_interval(report: Report) -> "Figure | None":
    """Left: both perplexities with their intervals over windows. Right: the change, on the same windows."""
    found = report.quality.perplexity
    if found.compressed is None or found.original is None:
        return None
    interval = found.ci95
    figure, axes = new_figure(1.85, columns=2)
    left, right = axes
    ours, theirs = (interval.compressed, interval.original) if interval else (None, None)
    _whisker(left, 0, found.compressed, ours, COMPRESSED, f"{found.compressed:.2f}")
    _whisker(left, 1, found.original, theirs, ORIGINAL, f"{found.original:.2f}")
    left.set_yticks([0, 1], ["compressed", "original"], color=INK)
    left.tick_params(axis="y", length=0)
    left.set_ylim(-0.6, 1.75)
    left.set_xlabel("perplexity per token" + (" (95 % interval)" if interval else ""))
    change = 100 * (found.compressed / found.original - 1)
    bounds = [100 * (bound - 1) for bound in interval.ratio] if interval else None
    _whisker(right, 0, change, bounds, COMPRESSED, f"{change:+.2f} %")
    right.axvline(0, color=ORIGINAL, linewidth=1, linestyle=(0, (4, 3)))
    right.set_yticks([])
    right.spines["left"].set_visible(False)
    right.set_ylim(-0.8, 1.0)
    right.set_xlabel("change of perplexity (%), same windows")
    for one in axes:
        one.margins(x=0.25)
        one.grid(axis="x")
    low, high = right.get_xlim()
    right.set_xlim(min(low, -0.15 * (high - low)), max(high, 0.15 * (high - low)))
    return figure


def speed_bars(report: Report) -> "Figure | None":
    """Tokens per second: original, compressed, speculative, and the baselines, lighter."""
    speed = report.speed
    bars = paces(speed, "compressed + speculative", 1)
    if not bars:
        return None
    rates = [(row.name, row.tokens_per_second) for row in speed.baselines or []]
    bars += [Bar(name, rate, f"{rate:,.1f}", BASELINE) for name, rate in rates if rate]
    figure, axes = new_figure(0.36 * len(bars) + 0.8)
    _horizontal(axes, bars)
    axes.set_xlabel("tokens per second, prompt included")
    return figure


def paces(speed: Speed, speculative: str, digits: int) -> list[Bar]:
    """The bars of our three ways of decoding, those that were measured; `speculative` is how the last is called, which
    has no bar where it does not pay."""
    ways = (("original", ORIGINAL), ("compressed", COMPRESSED), ("speculative", SPECULATIVE))
    return [
        Bar(speculative if name == "speculative" else name, pace, f"{pace:,.{digits}f}", colour)
        for name, colour in ways
        if (pace := speed.pace(name)) and (name != "speculative" or speed.pays)
    ]


def acceptance_by_position(report: Report) -> "Figure | None":
    """Share of drafts that are accepted up to each position, and what one fitted probability would give."""
    survival = report.speed.accepted_by_position
    if not survival:
        return None
    figure, axes = new_figure(2.5)
    places = list(range(1, len(survival) + 1))
    axes.bar(places, [100 * s for s in survival], width=0.62, color=SPECULATIVE, label="measured")
    p = report.speed.per_token_acceptance
    if p is not None:
        fitted = [100 * p**i for i in places]
        label = f"independent tokens, p = {p:.2f}"
        axes.plot(places, fitted, "o--", color=INK, markersize=3.5, linewidth=1, label=label)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    if len(places) <= 16:
        for place, share in zip(places, survival, strict=True):
            axes.text(place, 100 * share / 2, f"{100 * share:.0f}", ha="center", va="center", color="white")
        axes.set_xticks(places)
    axes.set_xlim(0.4, len(places) + 0.6)
    axes.set_ylim(0, max(108 * max(*survival, p or 0.0), 10))
    axes.grid(axis="y")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted up to it (%)")
    return figure


def layer_errors(report: Report) -> "Figure | None":
    """Relative error of each quantised layer, by block and by kind of layer."""
    layers = report.quality.layers
    if not layers:
        return None
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for index, layer in enumerate(layers):
        block, kind = split_layer_name(layer.name, index)
        series[kind].append((block, 100 * layer.error))
    figure, axes = new_figure(2.7)
    last = max(block for points in series.values() for block, _ in points)
    shift = min(0.09, 0.7 / max(len(series), 1))
    for index, (kind, points) in enumerate(sorted(series.items(), key=lambda item: _place(item[0]))):
        offset = (index - (len(series) - 1) / 2) * shift
        xs, ys = [block + offset for block, _ in points], [error for _, error in points]
        axes.plot(xs, ys, "o", color=_KINDS[index % len(_KINDS)], markersize=4 if last < 16 else 2.5, label=kind)
    axes.set_xlim(-0.6, last + 0.6)
    axes.set_ylim(0, 1.15 * max(error for points in series.values() for _, error in points) or 1)
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y")
    axes.set_xlabel("block")
    axes.set_ylabel("‖W − Ŵ‖ / ‖W‖ (%)")
    if len(series) <= 14:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handletextpad=0.1)
    return figure


def split_layer_name(name: str, index: int) -> tuple[int, str]:
    """(block, kind) of a layer: ("model.layers.3.mlp.up_proj") is (3, "up_proj"); without a number, its own place."""
    found = re.search(r"\.(\d+)\.(.+)$", name)
    if found is None:
        return index, name.rsplit(".", 1)[-1]
    # A mixture's experts are many: they share a kind ("experts.0.w1" and "experts.1.w1").
    return int(found[1]), re.sub(r"\.\d+\.", ".", found[2]).rsplit(".", 1)[-1]


def _place(kind: str) -> tuple[int, str]:
    """Where a kind stands in a block; unknown kinds come last, by name."""
    stem = kind.removesuffix("_proj")
    return (_ORDER.index(stem) if stem in _ORDER else len(_ORDER), kind)


def loss_curves(report: Report) -> "Figure | None":
    """The training loss and the held-out loss of each stage, in nats over tokens."""
    found = list(report.calibration.trained.items())[:_MOST_COLUMNS]
    if not found:
        return None
    figure, axes = new_figure(2.6, columns=len(found))
    for one, (kind, stage) in zip([axes] if len(found) == 1 else list(axes), found, strict=True):
        trained = [(point.tokens / 1e6, point.loss) for point in stage.curve if point.loss is not None]
        held_out = [(point.tokens / 1e6, point.held_out) for point in stage.curve if point.held_out is not None]
        one.plot(*zip(*trained, strict=True), color=ORIGINAL, linewidth=1, label="training loss")
        one.plot(*zip(*held_out, strict=True), "o-", color=COMPRESSED, markersize=3, linewidth=1.4, label="held out")
        best = stage.best_step * stage.tokens / stage.steps / 1e6
        one.plot([best], [stage.best], "o", color=INK, markersize=5, label="kept")
        one.set_title(kind, fontsize=9, loc="left")
        one.set_xlabel("tokens (millions)")
        one.grid(axis="y")
        one.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    first = axes if len(found) == 1 else axes[0]
    first.set_ylabel("loss (nats)")
    return figure


def _horizontal(axes: "Axes", bars: Sequence[Bar]) -> None:
    """Bars with a scale below them."""
    draw_bars(axes, bars, 0.012, "center")
    axes.set_xlim(0, max(bar.value for bar in bars) * 1.17)
    axes.grid(axis="x")


def _whisker(axes: "Axes", y: float, value: float, interval: Sequence[float] | None, colour: str, label: str) -> None:
    if interval is not None:
        axes.plot(list(interval), [y, y], color=colour, linewidth=2.5, solid_capstyle="butt", alpha=0.45)
        axes.plot([*interval], [y, y], "|", color=colour, markersize=9, markeredgewidth=1.5)
    axes.plot([value], [y], "o", color=colour, markersize=7)
    axes.annotate(label, (value, y), xytext=(0, 9), textcoords="offset points", ha="center", va="bottom", fontsize=9)
