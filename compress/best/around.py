"""What lies around a chosen assignment: the predicted front, other sizes, and what each unit's next bits would buy."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from compress.best.budgets import Budgets
from compress.best.predict import Known, Predicted, propose
from compress.best.space import Option, Unit

# Points of the predicted front, from the winner's damage over to that times this.
_POINTS, _WIDEST = 9, 8.0
MEGABYTE = 1_000_000
# Other sizes: so many steps to either side, of a megabyte or, where the model is small, of this part of its range.
_STEPS, _PART = 2, 20
# Units whose next bits are told: those that gain the most a megabyte.
_UPGRADES = 10
# How much more damage "a little worse" is.
_WORSE = 1.1


@dataclass(frozen=True)
class Step:
    """The least damaging assignment of another size: `bytes` more than the chosen one on disk, and its figures."""

    bytes: int
    disk: int
    figure: float
    tokens_per_second: float


@dataclass(frozen=True)
class Upgrade:
    """A unit with more bits, all else as chosen: `bytes` more on disk, and by how much the figure of quality falls."""

    unit: str
    before: str
    after: str
    bytes: int
    gain: float

    @property
    def per_megabyte(self) -> float:
        """What a megabyte spent here takes off the figure of quality."""
        return self.gain * MEGABYTE / self.bytes


@dataclass(frozen=True)
class Prices:
    """What more of a budget buys. `worse`: the best for the goal with a tenth more damage, None where there is none."""

    steps: tuple[Step, ...]
    upgrades: tuple[Upgrade, ...]
    worse: Predicted | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for plan.json."""
        return {
            "steps": [asdict(one) for one in self.steps],
            "upgrades": [{**asdict(one), "per_megabyte": one.per_megabyte} for one in self.upgrades],
            "worse": None if self.worse is None else point(self.worse),
        }


def point(one: Predicted) -> dict[str, Any]:
    """The figures of an assignment as plain data."""
    return {
        "key": one.key,
        "damage": one.damage,
        "figure": one.figure,
        "disk": one.disk,
        "memory": one.memory,
        "pace": asdict(one.pace),
    }


def front(known: Known, budgets: Budgets, damage: float) -> tuple[Predicted, ...]:
    """The best assignment for each of some sums of damages, without the budget of quality; what is no better goes."""
    goal = _goal(budgets)
    found: dict[str, Predicted] = {}
    for number in range(_POINTS):
        most = damage * _WIDEST ** (number / (_POINTS - 1) * 2 - 1)
        for one in propose(known, _without_quality(budgets), most)[:1]:
            found.setdefault(one.key, one)
    return tuple(one for one in found.values() if not any(_outdoes(other, one, goal) for other in found.values()))


def prices(known: Known, budgets: Budgets, chosen: Predicted) -> Prices:
    """What more and less of the disk, more bits for a unit, and a little more damage are predicted to change."""
    worse = next(iter(propose(known, _without_quality(budgets), _WORSE * chosen.damage)), None)
    return Prices(_steps(known, budgets, chosen), _upgrades(known, chosen), worse)


def _steps(known: Known, budgets: Budgets, chosen: Predicted) -> tuple[Step, ...]:
    found = []
    step = step_bytes(known)
    for number in range(-_STEPS, _STEPS + 1):
        asked = Budgets(disk=chosen.disk + number * step, memory=budgets.memory, goal="quality")
        for one in propose(known, asked, None)[:1]:
            found.append(Step(number * step, one.disk, one.figure, one.pace.tokens_per_second))
    return tuple(found)


def step_bytes(known: Known) -> int:
    """A megabyte, or 1, 2 or 5 times a power of ten that is a small part of how far sizes of the model go."""
    _, shares = known.sizes.shares()
    part = max(1.0, sum(max(row) - min(row) for row in shares) / _PART)
    power = 10 ** math.floor(math.log10(part))
    return min(MEGABYTE, max(times * power for times in (1, 2, 5) if times * power <= part))


def _upgrades(known: Known, chosen: Predicted) -> tuple[Upgrade, ...]:
    """Of each unit the option that gains the most a megabyte, if one gains at all; the dearest last."""
    found = []
    for unit in known.units:
        before = chosen.assignment[unit.name]
        offers = [_upgrade(known, chosen, unit, after) for after in unit.options if _goes_with(after, before)]
        gaining = [one for one in offers if one.bytes > 0 and one.gain > 0]
        found += sorted(gaining, key=lambda one: -one.per_megabyte)[:1]
    return tuple(sorted(found, key=lambda one: -one.per_megabyte)[:_UPGRADES])


def _goes_with(after: Option, before: Option) -> bool:
    """Whether a unit may change to another option, all else as it is: one model has the files of one library."""
    return after != before and (after.keeps or before.keeps or after.library == before.library)


def _upgrade(known: Known, chosen: Predicted, unit: Unit, after: Option) -> Upgrade:
    one = known.predict({**chosen.assignment, unit.name: after})
    before = str(chosen.assignment[unit.name])
    return Upgrade(unit.name, before, str(after), one.disk - chosen.disk, chosen.figure - one.figure)


def _goal(budgets: Budgets) -> str:
    return "speed" if budgets.goal == "quality" else budgets.goal


def _without_quality(budgets: Budgets) -> Budgets:
    return replace(budgets, quality=None, kl=None, goal=_goal(budgets))


def _outdoes(other: Predicted, one: Predicted, goal: str) -> bool:
    better = other.figure <= one.figure and other.disk <= one.disk
    return better and other.objective(goal) < one.objective(goal)
