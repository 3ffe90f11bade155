"""What the report says and draws of stages that train. Figures come from report.json's dict, nothing else."""

from typing import TYPE_CHECKING, Any

from compress.report.figure import COMPRESSED, INK, ORIGINAL, new_figure
from compress.report.wording import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_COLUMNS = 3


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each stage that trained: kind, budget, steps, tokens, seconds, held-out loss before and best."""
    out: list[tuple[str, ...]] = []
    for kind, stage in stages(report).items():
        best = f"{stage['best']:.4f} (step {stage['best_step']:,})"
        figures = (f"{stage['steps']:,}", f"{stage['tokens']:,}", f"{number(stage['seconds'], 0)} s")
        out.append((kind, _budget(stage), *figures, f"{stage['before']:.4f}", best))
    return out


def perplexities(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Perplexity of the held-out windows along each stage's way, where a stage says it."""
    return [
        (kind, name.replace("_", " "), number(value, 3))
        for kind, stage in stages(report).items()
        for name, value in stage.get("perplexity", {}).items()
    ]


def sources(report: dict[str, Any]) -> list[str]:
    """What each stage was trained on, a sentence a stage."""
    return [
        f"{kind} was trained on {stage['text']['source']}, {stage['text']['documents']:,} documents; its best weights "
        f"were chosen on {stage['text']['held_out_tokens']:,} other tokens, which nothing else reads."
        for kind, stage in stages(report).items()
        if "text" in stage
    ]


def stages(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The stages that trained in the loop, by kind."""
    training = report["calibration"]["training"]
    return {kind: stage for kind, stage in training.items() if isinstance(stage, dict) and "curve" in stage}


def loss_curves(report: dict[str, Any]) -> "Figure | None":
    """The training loss and the held-out loss of each stage, in nats over tokens."""
    found = list(stages(report).items())[:_MOST_COLUMNS]
    if not found:
        return None
    figure, axes = new_figure(2.6, columns=len(found))
    for one, (kind, stage) in zip([axes] if len(found) == 1 else list(axes), found, strict=True):
        curve = stage["curve"]
        trained = [(point["tokens"] / 1e6, point["loss"]) for point in curve if point.get("loss") is not None]
        held_out = [(point["tokens"] / 1e6, point["held_out"]) for point in curve if point.get("held_out") is not None]
        one.plot(*zip(*trained, strict=True), color=ORIGINAL, linewidth=1, label="training loss")
        one.plot(*zip(*held_out, strict=True), "o-", color=COMPRESSED, markersize=3, linewidth=1.4, label="held out")
        best = stage["best_step"] * stage["tokens"] / stage["steps"] / 1e6
        one.plot([best], [stage["best"]], "o", color=INK, markersize=5, label="kept")
        one.set_title(kind, fontsize=9, loc="left")
        one.set_xlabel("tokens (millions)")
        one.grid(axis="y")
        one.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    first = axes if len(found) == 1 else axes[0]
    first.set_ylabel("loss (nats)")
    return figure


def _budget(stage: dict[str, Any]) -> str:
    budget = stage.get("budget", {})
    return f"{budget['minutes']:g} minutes" if "minutes" in budget else f"{budget.get('tokens', 0):,} tokens"
