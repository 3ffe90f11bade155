"""plan.json and plan.md: what was chosen and why, as data and for people."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.artifact.files import write_atomic, write_json
from compress.best.budgets import Budgets
from compress.best.candidates import Measured
from compress.best.contest import ORIGINAL, Way, fastest
from compress.best.predict import Known, Predicted, propose
from compress.best.space import NOT_TRIED
from compress.report.schema_speed import PLAIN

SCHEMA = 1
# Points of the predicted front, from the original's quality to this many times the winner's damage.
_POINTS, _WIDEST = 9, 8.0
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Plan:
    """What was found.

    original   its bytes on disk, and its fastest forward's tokens a second when decoding plainly.
    measured   candidates that were made, in order; refused: by key, which budget each has broken in measurement.
    ways       of decoding that were timed in turns.
    winner     the key of the chosen one.
    front      predicted points from better to smaller; prices: what a little more of a budget buys, in sentences.
    """

    model: str
    budgets: Budgets
    original_bytes: int
    measured: tuple[Measured, ...]
    refused: Mapping[str, str]
    ways: tuple[Way, ...]
    winner: str
    front: tuple[Predicted, ...]
    prices: tuple[str, ...]
    about: Mapping[str, Any]

    @property
    def best(self) -> Measured:
        return next(one for one in self.measured if one.key == self.winner)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: plan.json."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "budgets": self.budgets.to_dict(),
            "original_bytes": self.original_bytes,
            "winner": self.winner,
            "bits": self.best.choice,
            "candidates": [
                {
                    "key": one.key,
                    "predicted": one.predicted,
                    "measured": _figures(one),
                    "broke": self.refused.get(one.key),
                }
                for one in self.measured
            ],
            "ways": [asdict(way) for way in self.ways],
            "front": [
                {"figure": p.figure, "disk": p.disk, "memory": p.memory, "pace": asdict(p.pace)} for p in self.front
            ],
            "prices": list(self.prices),
            "not_tried": [{"what": what, "why": why} for what, why in NOT_TRIED],
            "about": dict(self.about),
        }


def _figures(one: Measured) -> dict[str, Any]:
    growth, upper = one.perplexity
    return {
        "disk": one.disk,
        "memory": one.memory,
        "perplexity_growth": growth,
        "perplexity_growth_upper": upper,
        "kl": one.kl,
        "forward_ms": {str(width): spent for width, spent in one.forward_ms.items()},
    }


def front(known: Known, budgets: Budgets, damage: float) -> tuple[Predicted, ...]:
    """The best assignment for each of some sums of damages, without the budget of quality; what is no better goes."""
    found: list[Predicted] = []
    for point in range(_POINTS):
        most = damage * _WIDEST ** (point / (_POINTS - 1) * 2 - 1)
        goal = "speed" if budgets.goal == "quality" else budgets.goal
        asked = Budgets(disk=budgets.disk, memory=budgets.memory, latency=budgets.latency, goal=goal)
        best = next(iter(propose(known, asked, most)), None)
        if best is not None and all(best.key != one.key for one in found):
            found.append(best)
    return tuple(
        one
        for one in found
        if not any(
            other.figure <= one.figure and other.objective(goal) < one.objective(goal) and other.disk <= one.disk
            for other in found
        )
    )


def prices(known: Known, budgets: Budgets, chosen: Predicted) -> tuple[str, ...]:
    """What the next megabyte of files, and a tenth more damage, are predicted to buy at the chosen assignment."""
    told = []
    for step in (_MEGABYTE, -_MEGABYTE):
        asked = Budgets(disk=chosen.disk + step, memory=budgets.memory, goal="quality")
        here = Budgets(disk=chosen.disk, memory=budgets.memory, goal="quality")
        now, then = (next(iter(propose(known, one, None)), None) for one in (here, asked))
        word = "one megabyte more" if step > 0 else "one megabyte less"
        if now is None or then is None:
            told.append(f"{word}: nothing is predicted to fit")
        elif now.key == then.key:
            told.append(f"{word} buys nothing")
        else:
            told.append(
                f"{word} on disk: the least damaging choice goes from {budgets.shown(now.figure)} to "
                f"{budgets.shown(then.figure)} (predicted)"
            )
    goal = "speed" if budgets.goal == "quality" else budgets.goal
    asked = Budgets(disk=budgets.disk, memory=budgets.memory, latency=budgets.latency, goal=goal)
    wider = next(iter(propose(known, asked, 1.1 * chosen.damage)), None)
    if wider is not None:
        told.append(
            f"a tenth more damage ({budgets.shown(wider.figure)}): {_megabytes(wider.disk)} instead of "
            f"{_megabytes(chosen.disk)}, {wider.pace.tokens_per_second:.0f} tokens/s instead of "
            f"{chosen.pace.tokens_per_second:.0f} (predicted)"
        )
    return tuple(told)


def write(plan: Plan, out: Path) -> None:
    """Writes plan.json and plan.md, each whole or not at all."""
    write_json(out / "plan.json", plan.to_dict())
    write_atomic(out / "plan.md", markdown(plan).encode())


def markdown(plan: Plan) -> str:
    """The plan for people."""
    best, budgets = plan.best, plan.budgets
    way = fastest(plan.ways, plan.winner)
    reference = fastest(plan.ways, ORIGINAL)
    gain = way.tokens_per_second / max(reference.tokens_per_second, 1e-9)
    lines = [
        f"# The best of {plan.model} for {budgets.goal}",
        "",
        f"Asked: {_asked(budgets)}.",
        "",
        f"- **size**: {_megabytes(plan.original_bytes)} → {_megabytes(best.disk)} on disk, "
        f"{_megabytes(best.memory)} in memory with keys, values and draft",
        f"- **quality**: perplexity {_growth(best)}, KL {best.kl:.4f} nats",
        f"- **speed**: {way.tokens_per_second:.0f} tokens/s ({_drafting(way)}), {gain:.2f} × the original's "
        f"{reference.tokens_per_second:.0f}, timed in turns, "
        "the prompts' time left out",
        "",
        "`best/` is the run: its report times every drafter. `best/recipe.yaml` alone gives the same weights, with the "
        "same `--eval-tokens`, seed and threads: what is not measured on is calibrated on.",
        "",
        "## Candidates that were made and measured",
        "",
        "| | disk | memory | quality: predicted | measured | tokens/s: predicted | measured | drafter | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(plan, one) for one in plan.measured),
        "",
        "## Bits by layer",
        "",
        "| layers | becomes |",
        "|---|---|",
        *(f"| `{unit}` | {option} |" for unit, option in best.choice.items()),
        "",
        "## The predicted front",
        "",
        "Predictions, corrected by the candidates above: a rank, and figures only near them.",
        "",
        "| quality | disk | memory | tokens/s | drafter, γ |",
        "|---|---|---|---|---|",
        *(
            f"| {budgets.shown(p.figure)} | {_megabytes(p.disk)} | {_megabytes(p.memory)} | "
            f"{p.pace.tokens_per_second:.0f} | {_paced(p)} |"
            for p in plan.front
        ),
        "",
        "## What more would buy",
        "",
        *(f"- {line}" for line in plan.prices),
        "",
        "## Not tried",
        "",
        *(f"- {what}: {why}" for what, why in NOT_TRIED),
        "",
    ]
    return "\n".join(lines)


def _row(plan: Plan, one: Measured) -> str:
    timed = any(way.model == one.key for way in plan.ways)
    way = fastest(plan.ways, one.key) if timed else None
    remark = "**chosen**" if one.key == plan.winner else plan.refused.get(one.key, "")
    cells = (
        f"`{one.key}`",
        _megabytes(one.disk),
        _megabytes(one.memory),
        plan.budgets.shown(one.predicted["figure"]),
        plan.budgets.shown(one.figure(plan.budgets)),
        f"{one.predicted['tokens_per_second']:.0f}",
        "not timed" if way is None else f"{way.tokens_per_second:.0f}",
        "" if way is None else way.drafter,
        remark,
    )
    return f"| {' | '.join(cells)} |"


def _asked(budgets: Budgets) -> str:
    words = []
    if budgets.figure_limit is not None:
        words.append(f"{budgets.shown(budgets.figure_limit)} at most")
    for name in ("disk", "memory"):
        if (size := getattr(budgets, name)) is not None:
            words.append(f"{_megabytes(size)} {'on disk' if name == 'disk' else 'in memory'}")
    if budgets.latency is not None:
        words.append(f"{budgets.latency:g} ms a token")
    return ", ".join(words)


def _growth(one: Measured) -> str:
    growth, upper = one.perplexity
    end = "" if upper is None else f" (at most {100 * upper:+.2f} %, 95 %)"
    return f"{100 * growth:+.2f} %{end}"


def _drafting(way: Way) -> str:
    return "plain decoding" if way.drafter == PLAIN else f"drafter {way.drafter}"


def _paced(point: Predicted) -> str:
    return "plain" if point.pace.drafter == PLAIN else f"{point.pace.drafter}, {point.pace.draft_length}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"
