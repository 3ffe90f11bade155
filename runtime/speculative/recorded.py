"""What a run's report says of drafters: who was fastest when the run was measured, and what its drafts gained and took.

Commands take that drafter by default, and begin with the γ that these figures find best.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import read_json
from runtime.speculative.draft import parts
from runtime.speculative.measured import Prior

_SCHEMA = 2  # of report.json, from which on `speed.drafter` is who was fastest of all, plain decoding included


@dataclass(frozen=True)
class Recorded:
    """A drafter by its name, "none" where plain decoding was the fastest; and its speed over plain decoding.

    prior  what was measured of it; None where nobody drafted, or the report does not say it.
    """

    drafter: str
    speedup: float
    prior: Prior | None = None


def recorded(target: str | Path) -> Recorded | None:
    """Of a run folder, or of its `model/`. None where there is no report, or it says nothing of drafters.

    Raises UserError for a report that cannot be read.
    """
    given = Path(target).expanduser()
    folder = given.parent if given.name == "model" else given
    report = folder / "report.json"
    try:
        if not (folder / "model" / "config.json").is_file() or not report.exists():
            return None
    except OSError:  # no path that a system takes: whoever loads the target says so
        return None
    try:
        found = read_json(report)
    except UserError as error:
        raise UserError(f"{error}; or name a drafter with --drafter") from error
    schema, speed = found.get("schema"), found.get("speed")
    if not isinstance(schema, int) or schema < _SCHEMA or not isinstance(speed, dict) or speed.get("drafter") is None:
        return None
    gained = speed.get("speedup")
    drafter, speedup = speed["drafter"], gained.get("over_compressed") if isinstance(gained, dict) else None
    if not isinstance(drafter, str) or not isinstance(speedup, int | float):
        raise UserError(
            f"{folder.name}/report.json: speed.drafter and speed.speedup do not say who was fastest; make the report"
            " again, or name a drafter with --drafter"
        )
    return Recorded(drafter, float(speedup), _prior(speed) if drafter != "none" else None)


def _prior(speed: dict[str, Any]) -> Prior | None:
    """What `speed` of a report says of its fastest drafter; None where that is not enough to begin with."""
    try:
        length = max(1, round(speed["mean_draft_length"]))
        drafting = length * speed["draft_cost_ratio"]
        widths = {int(cost["width"]): float(cost["ratio"]) for cost in speed["width_costs"]}
        return Prior(tuple(map(float, speed["accepted_by_position"])), length, drafting, widths)
    except (KeyError, TypeError, ValueError):
        return None


def needs_planes(name: str | None, draft: str | Path | None, target: str | Path) -> bool:
    """Whether `load` has to lay a target's weights out for `nested`: it is named, or is what its report recommends.

    draft  where one is given it drafts, unless a drafter is named.
    """
    if name is None and draft is None:
        found = recorded(target)
        name = None if found is None else found.drafter
    return "nested" in parts(name or "")
