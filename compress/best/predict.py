"""What is known of a model, what it predicts of an assignment, and the assignments that it predicts to be the best."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from compress.best.acceptance import LENGTH, Drafts, Pace, pace
from compress.best.budgets import Budgets
from compress.best.costs import WIDTHS, Costs
from compress.best.quality import QualityModel
from compress.best.sizes import Sizes
from compress.best.solve import InfeasibleError, Solution, solve
from compress.best.space import CACHE, CACHES, KEEP, Assignment, Option, Unit, by_library
from compress.errors import UserError

# Among options of one cost the less damaging: all damages together weigh so much of the cheapest choice's cost.
_TIE = 1e-4
Table = list[list[float]]


@dataclass(frozen=True)
class Known:
    """All that assignments are judged by.

    drafts  of every drafter.
    beside  bytes of memory that the draft takes, its keys and values included.
    caches  bytes of the target's keys and values in each of CACHES, of those that may be chosen.
    """

    units: tuple[Unit, ...]
    sizes: Sizes
    costs: Costs
    drafts: tuple[Drafts, ...]
    quality: QualityModel
    beside: int
    caches: tuple[int, ...] = (0,)

    def table(self, figure: Callable[[Unit, Option], float], caches: Sequence[float] = ()) -> Table:
        """[unit][option] of a figure, and last what it is of each cache; (): nothing."""
        rows = [[figure(unit, option) for option in unit.options] for unit in self.units]
        return [*rows, list(map(float, caches)) or [0.0] * len(self.caches)]

    @property
    def damages(self) -> Table:
        """Of every option of every unit, and of caches."""
        return [*map(list, self.quality.damages), list(self.quality.caches)]

    @property
    def held(self) -> Table:
        """Bytes of memory."""
        return self.table(lambda unit, option: float(self.costs.memory(unit, option)), self.caches)

    @property
    def stored(self) -> tuple[int, Table]:
        """Bytes on disk: of what cannot be chosen, and of options."""
        rest, shares = self.sizes.shares()
        row = [float(self.sizes.cache_share(option)) for option in CACHES[: len(self.caches)]]
        return rest, [*([float(x) for x in one] for one in shares), row]

    def by_library(self) -> Iterator["Known"]:
        """The same of the options of each library, which alone fit into one model."""
        for units in by_library(self.units):
            sizes, quality = replace(self.sizes, units=units), self.quality.limited(units)
            yield replace(self, units=units, sizes=sizes, quality=quality)

    def predict(self, assignment: Assignment) -> "Predicted":
        """All figures of an assignment."""
        memory = sum(self.costs.memory(unit, assignment[unit.name]) for unit in self.units)
        memory += self.caches[CACHES.index(assignment.get(CACHE, KEEP))]
        return Predicted(
            dict(assignment),
            self.sizes.exact(assignment),
            self.beside + self.costs.other + memory,
            self.quality.total(assignment),
            self.quality.predicted(assignment),
            pace(self.costs.round(self.units, assignment), self.drafts),
        )


@dataclass(frozen=True)
class Predicted:
    """An assignment and its figures: bytes, the sum of damages, the figure of quality, the fastest way to decode."""

    assignment: Assignment
    disk: int
    memory: int
    damage: float
    figure: float
    pace: Pace

    @property
    def key(self) -> str:
        """A name for the assignment: equal ones have the same."""
        return key_of(self.assignment)

    def objective(self, goal: str) -> float:
        """What is to be small for a goal."""
        return {"speed": 1e3 / self.pace.tokens_per_second, "size": float(self.disk), "quality": self.figure}[goal]


def key_of(assignment: Assignment) -> str:
    """A name for an assignment: equal ones have the same."""
    return sha256("\n".join(f"{name}: {assignment[name]}" for name in sorted(assignment)).encode()).hexdigest()[:12]


def propose(known: Known, budgets: Budgets, damage: float | None) -> list[Predicted]:
    """Assignments within the budgets, the best first; none where none is.

    damage  the most that damages may sum up to; None: as much as may be. The budget of quality itself is the caller's,
            who knows what was measured.
    """
    found = {one.key: one for part in known.by_library() for one in _propose(part, budgets, damage)}
    return sorted(found.values(), key=lambda one: (one.objective(budgets.goal), one.disk))


def _propose(known: Known, budgets: Budgets, damage: float | None) -> list[Predicted]:
    """Those among options that one model can hold, in no order."""
    found: dict[str, Predicted] = {}
    for cost, more in _questions(known, budgets):
        with_damage = [] if damage is None else [(known.damages, damage)]
        try:
            solution = _solved(known, cost, [*limits_of(known, budgets), *with_damage, *more])
        except InfeasibleError:
            continue
        one = known.predict(_assignment(known, solution))
        if budgets.disk is not None and one.disk > budgets.disk:
            continue
        if budgets.latency is None or 1e3 / one.pace.tokens_per_second <= budgets.latency:
            found.setdefault(one.key, one)
    return list(found.values())


def limits_of(known: Known, budgets: Budgets) -> list[tuple[Table, float]]:
    """The budgets of bytes as what options use of them, and how much there is."""
    found: list[tuple[Table, float]] = []
    if budgets.disk is not None:
        rest, stored = known.stored
        found.append((stored, float(budgets.disk - rest)))
    if budgets.memory is not None:
        left = budgets.memory - known.beside - known.costs.other
        found.append((known.held, float(left)))
    return found


def _questions(known: Known, budgets: Budgets) -> Iterator[tuple[Table, list[tuple[Table, float]]]]:
    """What is to be least, and what else must hold: several questions, of whose answers the best one counts.

    Speed: a forward at each width, as drafts of one length less want it. Otherwise the goal, with the latency that
    each width's best drafter leaves for a forward.
    """
    if budgets.goal == "speed":
        for width in WIDTHS:
            yield _times(known, width), []
        return
    goal = known.stored[1] if budgets.goal == "size" else known.damages
    if budgets.latency is None:
        yield goal, []
        return
    for width, rest in zip(WIDTHS, known.costs.rest, strict=True):
        yield goal, [(_times(known, width), _forward_limit(known, width, budgets.latency) - rest)]


def _forward_limit(known: Known, width: int, latency: float) -> float:
    """Milliseconds that a forward may take for so many a token, where drafts have one token less than its rows."""
    if width == 1:
        return latency - known.costs.beyond[0]
    length, beyond = min(width - 1, LENGTH), known.costs.beyond[WIDTHS.index(width)]
    limits = [
        latency * (1.0 + sum(one.accepted[:length]))
        - one.milliseconds * sum(one.drafted[:length])
        - one.beside
        - beyond
        for one in known.drafts
    ]
    return max(limits, default=0.0)


def _times(known: Known, width: int) -> Table:
    return known.table(lambda unit, option: known.costs.product(unit, option, width))


def _solved(known: Known, cost: Table, limits: Sequence[tuple[Table, float]]) -> Solution:
    """Raises InfeasibleError, also for a limit below zero."""
    if any(limit < 0 for _, limit in limits):
        raise InfeasibleError("what cannot be chosen takes more than the budget")
    damages = known.damages
    least, most = sum(map(min, cost)), sum(map(max, damages))
    weight = _TIE * least / most if most > 0 else 0.0
    tied = [[c + weight * d for c, d in zip(*rows, strict=True)] for rows in zip(cost, damages, strict=True)]
    return solve(tied, [table for table, _ in limits], [limit for _, limit in limits])


def _assignment(known: Known, solution: Solution) -> dict[str, Option]:
    *picks, cache = solution.picks
    chosen = {unit.name: unit.options[pick] for unit, pick in zip(known.units, picks, strict=True)}
    return chosen | ({CACHE: CACHES[cache]} if cache else {})


def reachable(known: Known, budgets: Budgets, damage: float | None) -> str:
    """The nearest figures that can be reached, as a phrase: of each budget its least within the others."""
    words = []
    if budgets.figure_limit is not None:
        least = _least(known, budgets, None, "quality")
        words.append("no figure of quality" if least is None else f"{budgets.shown(least.figure)} (--quality or --kl)")
    if budgets.disk is not None:
        least = _least(known, replace(budgets, disk=None), damage, "size")
        if least is not None:
            words.append(f"{least.disk / 1e6:.2f} MB (--disk)")
    if budgets.memory is not None:
        least = _least(known, replace(budgets, memory=None), damage, "memory")
        if least is not None:
            words.append(f"{least.memory / 1e6:.2f} MB (--memory)")
    if budgets.latency is not None:
        least = _least(known, replace(budgets, latency=None), damage, "speed")
        if least is not None:
            words.append(f"{1e3 / least.pace.tokens_per_second:.3g} ms a token (--latency)")
    return ", or ".join(words)


def _least(known: Known, budgets: Budgets, damage: float | None, goal: str) -> Predicted | None:
    """The assignment that is best for a goal within these budgets; None where nothing is within them."""
    if goal != "memory":
        return next(iter(propose(known, replace(budgets, goal=goal), damage)), None)
    found = []
    for part in known.by_library():
        more = [] if damage is None else [(part.damages, damage)]
        with suppress(InfeasibleError):
            solution = _solved(part, part.held, [*limits_of(part, budgets), *more])
            found.append(part.predict(_assignment(part, solution)))
    return min(found, key=lambda one: one.memory, default=None)


def require_reachable(known: Known, budgets: Budgets, damage: float | None) -> None:
    """Raises UserError with the nearest reachable figures where no assignment is predicted to be within the budgets."""
    if not propose(known, budgets, damage):
        nearest = reachable(known, budgets, damage) or "nothing"
        raise UserError(
            f"no choice of bits is predicted to keep these budgets; each within the others reaches {nearest}"
        )
