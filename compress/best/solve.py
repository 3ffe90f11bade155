"""The best choice of one option for each unit within several budgets: a multiple-choice knapsack of many dimensions.

One budget is the exact knapsack's work (compress/quantize/knapsack.py). For more, prices of the budgets are found by
subgradient steps (Lagrange), which give a bound on what any choice can reach; dynamic programming over the partial
choices that the bound leaves, without those that another beats in every respect, then finds the best one. Where there
are too many of them the most promising go on, and with many units a choice within a thousandth of the bound is taken as
it is, which is closer than costs are known: the solution says that it may not be the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.quantize.knapsack import choose

Floats = NDArray[np.float64]
# Partial choices that are kept at once (fewer where units are many: so many in all), steps towards the prices, and how
# many each partial choice is held against.
_MOST, _ALL, _STEPS, _RIVALS = 20_000, 100_000, 300, 64
# Of so many times as many as are kept those that another beats are looked for.
_FEW = 2
# Of more units than these a choice this near to the bound is near enough.
_MANY, _NEAR = 24, 1e-3


class InfeasibleError(ValueError):
    """No choice fits all budgets."""


@dataclass(frozen=True)
class Solution:
    """An option's place for each unit, the sum of their costs, and whether none is better for certain."""

    picks: tuple[int, ...]
    cost: float
    exact: bool


def solve(
    costs: Sequence[Sequence[float]],
    uses: Sequence[Sequence[Sequence[float]]],
    limits: Sequence[float],
    most: int | None = None,
) -> Solution:
    """The choice of the least cost whose uses are within every limit.

    costs  [unit][option], not negative.
    uses   [budget][unit][option], not negative; limits: [budget].
    most   partial choices that are kept; fewer make it quicker and less exact. None: as many as take seconds.

    Raises InfeasibleError where no choice fits (or, where too many partial choices were dropped, none was found).
    """
    for use, limit in zip(uses, limits, strict=True):
        if sum(map(min, use)) > limit:
            raise InfeasibleError(f"the least use is {sum(map(min, use)):g}, the budget {limit:g}")
    active = [i for i, use in enumerate(uses) if sum(map(max, use)) > limits[i]]
    if not active:
        picks = [int(np.argmin(row)) for row in costs]
        return Solution(tuple(picks), _total(costs, picks), True)
    if len(active) == 1:
        picks = choose(costs, uses[active[0]], limits[active[0]])
        return Solution(tuple(picks), _total(costs, picks), True)
    # Columns of a unit's options: the cost, then the uses over their limits.
    tables = [
        np.column_stack(
            [np.asarray(row, np.float64), *(np.asarray(uses[i][u]) / max(limits[i], 1e-300) for i in active)]
        )
        for u, row in enumerate(costs)
    ]
    kept = [_undominated(table) for table in tables]
    tables = [table[index] for table, index in zip(tables, kept, strict=True)]
    prices, bound, incumbent = _prices(tables)
    if incumbent is not None and len(tables) > _MANY and incumbent[1] - bound <= _NEAR * bound:
        picks = [int(index[place]) for index, place in zip(kept, incumbent[0], strict=True)]
        return Solution(tuple(picks), _total(costs, picks), False)
    most = min(_MOST, _ALL // len(tables)) if most is None else most
    found, exact = _search(tables, prices, _INFINITE if incumbent is None else incumbent[1], most)
    if found is None and incumbent is None:
        raise InfeasibleError("no choice was found that fits all budgets together")
    places = found if found is not None else (incumbent or ([], 0.0))[0]
    picks = [int(index[place]) for index, place in zip(kept, places, strict=True)]
    return Solution(tuple(picks), _total(costs, picks), exact)


_INFINITE = float("inf")
_SLACK = 1e-12


def _total(table: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return sum(float(row[pick]) for row, pick in zip(table, picks, strict=True))


def _undominated(table: Floats) -> NDArray[np.int64]:
    """The rows that no other row equals or beats in every column; of equal rows the first."""
    keep = []
    for i, row in enumerate(table):
        below = (table <= row).all(axis=1)
        equal = (table == row).all(axis=1)
        if not (below & ~equal).any() and not equal[:i].any():
            keep.append(i)
    return np.array(keep, dtype=np.int64)


def _prices(tables: Sequence[Floats]) -> tuple[Floats, float, tuple[list[int], float] | None]:
    """Prices of the budgets whose bound is the highest that was met; it; and the best choice that fits, if any did."""
    budgets = tables[0].shape[1] - 1
    prices, best = np.zeros(budgets), np.zeros(budgets)
    bound, incumbent = -_INFINITE, None
    scale = max(sum(float(table[:, 0].max() - table[:, 0].min()) for table in tables), 1e-30)
    # [unit, option, column]; options that a unit does not have cost more than any.
    padded = np.full((len(tables), max(map(len, tables)), budgets + 1), _INFINITE)
    for unit, table in enumerate(tables):
        padded[unit, : len(table)] = table
    uses = np.where(np.isfinite(padded[:, :, 1:]), padded[:, :, 1:], 0.0)
    units = np.arange(len(tables))
    for step in range(_STEPS):
        picks = (padded[:, :, 0] + uses @ prices).argmin(axis=1)
        total = padded[units, picks].sum(axis=0)
        excess = total[1:] - 1.0
        if (here := float(total[0] + prices @ excess)) > bound:
            bound, best = here, prices.copy()
        if (excess <= _SLACK).all() and (incumbent is None or total[0] < incumbent[1]):
            incumbent = (picks.tolist(), float(total[0]))
        prices = np.maximum(0.0, prices + excess * scale / (1 + step / 4))
    return best, bound, incumbent


def _search(tables: Sequence[Floats], prices: Floats, incumbent: float, most: int) -> tuple[list[int] | None, bool]:
    """The best choice at or below the incumbent's cost, None where there is none; whether nothing was dropped."""
    weights = np.concatenate([[1.0], prices])
    rest_priced = np.cumsum([0.0, *(float((table @ weights).min()) for table in reversed(tables))])[::-1]
    rest_least = np.cumsum([np.zeros(len(prices)), *(t[:, 1:].min(axis=0) for t in reversed(tables))], axis=0)[::-1]
    limit = incumbent + 1e-9 * abs(incumbent)
    states, exact = np.zeros((1, len(weights))), True
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for unit, table in enumerate(tables):
        grown = (states[:, None] + table).reshape(-1, len(weights))
        bounds = grown @ weights + rest_priced[unit + 1] - prices.sum()
        fits = (grown[:, 1:] + rest_least[unit + 1] <= 1.0 + _SLACK).all(axis=1)
        kept = np.flatnonzero(fits & (bounds <= limit))
        kept = kept[np.lexsort((*grown[kept].T[::-1], bounds[kept]))]
        if len(kept) > _FEW * most:
            kept, exact = kept[: _FEW * most], False
        kept = kept[_rivalled(grown[kept])]
        if len(kept) > most:
            kept, exact = kept[:most], False
        if not len(kept):
            return None, exact
        steps.append((kept // len(table), kept % len(table)))
        states = grown[kept]
    state = int(states[:, 0].argmin())
    picks = []
    for parent, option in reversed(steps):
        picks.append(int(option[state]))
        state = int(parent[state])
    return picks[::-1], exact


def _rivalled(states: Floats) -> NDArray[np.bool_]:
    """Which states none of the first ones equals or beats in every column."""
    keep = np.ones(len(states), dtype=bool)
    for rival in range(min(_RIVALS, len(states))):
        if keep[rival]:
            beaten = (states >= states[rival]).all(axis=1)
            beaten[rival] = False
            keep &= ~beaten
    return keep
