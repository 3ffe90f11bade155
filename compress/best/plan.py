"""plan.json, plan.md and plan.html: what was chosen and why; both texts show what the JSON file has, and no more."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.artifact.files import write_atomic, write_json
from compress.best.around import Prices, point
from compress.best.budgets import Budgets
from compress.best.candidates import Measured
from compress.best.contest import ORIGINAL, Way, fastest
from compress.best.further import Further
from compress.best.page import html, markdown
from compress.best.predict import Predicted
from compress.best.space import CACHE, KEEP, NOT_TRIED, OPTIONS, Unit

SCHEMA = 6


@dataclass(frozen=True)
class Plan:
    """What was found.

    units      what could be chosen for, in the order of the blocks.
    original   its bytes on disk.
    measured   candidates that were made, in order; refused: by key, which budget each has broken in measurement.
    ways       of decoding that were timed in turns.
    first_ms   by key, and of the original: milliseconds to the first token, where that has a budget.
    winner     the key of the chosen one.
    front      predicted points from better to smaller; prices: what a little more of a budget buys.
    about      what else the figures depend on, by name.
    further    what may follow, and takes longer.
    """

    model: str
    budgets: Budgets
    units: tuple[Unit, ...]
    original_bytes: int
    measured: tuple[Measured, ...]
    refused: Mapping[str, str]
    ways: tuple[Way, ...]
    first_ms: Mapping[str, float]
    winner: str
    front: tuple[Predicted, ...]
    prices: Prices
    about: Mapping[str, Any]
    further: tuple[Further, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: plan.json, and all that the page shows."""
        choice = next(one for one in self.measured if one.key == self.winner).choice
        bits = {str(option): option.bits for option in OPTIONS}
        return {
            "schema": SCHEMA,
            "model": self.model,
            "budgets": self.budgets.to_dict(),
            "original": {
                "disk": self.original_bytes,
                "fastest": asdict(fastest(self.ways, ORIGINAL)),
                "ttft_ms": self.first_ms.get(ORIGINAL),
            },
            "winner": self.winner,
            "cache": choice.get(CACHE, str(KEEP)),
            "units": [
                {
                    "name": unit.name,
                    "block": unit.block,
                    "weights": unit.weights,
                    "option": choice[unit.name],
                    "bits": bits[choice[unit.name]],
                }
                for unit in self.units
            ],
            "candidates": [self._candidate(one) for one in self.measured],
            "ways": [asdict(way) for way in self.ways],
            "front": [point(one) for one in self.front],
            "prices": self.prices.to_dict(),
            "not_tried": [{"what": what, "why": why} for what, why in NOT_TRIED],
            "further": [
                {name: value for name, value in one.to_dict().items() if name != "text"} for one in self.further
            ],
            "about": dict(self.about),
        }

    def _candidate(self, one: Measured) -> dict[str, Any]:
        timed = any(way.model == one.key for way in self.ways)
        growth, upper = one.perplexity
        return {
            "key": one.key,
            "choice": one.choice,
            "predicted": one.predicted,
            "measured": {
                "disk": one.disk,
                "memory": one.memory,
                "figure": one.figure(self.budgets),
                "perplexity_growth": growth,
                "perplexity_growth_upper": upper,
                "kl": one.kl,
                "ttft_ms": self.first_ms.get(one.key),
                "forward_ms": {str(width): spent for width, spent in one.forward_ms.items()},
            },
            "fastest": asdict(fastest(self.ways, one.key)) if timed else None,
            "broke": self.refused.get(one.key),
        }


def write(plan: Plan, out: Path) -> None:
    """Writes plan.json, plan.md, plan.html and the recipes that may follow, each whole or not at all."""
    data = plan.to_dict()
    for one in plan.further:
        if one.text:
            write_atomic(out / one.file, one.text.encode())
    write_atomic(out / "plan.md", markdown(data).encode())
    write_atomic(out / "plan.html", html(data).encode())
    write_json(out / "plan.json", data)
