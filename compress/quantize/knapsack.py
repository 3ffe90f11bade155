"""Which candidate for each layer, so that the costs are least within a budget of sizes: an exact knapsack.

The multiple-choice knapsack problem. A Lagrange multiplier gives a good choice and a bound on how much better any other
could be (Everett, 1963); dynamic programming over the choices that neither cost nor weigh more than another (Nemhauser
and Ullmann, 1969) finds the best one, and the bound leaves it few to look at.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BISECTIONS = 100


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Index of the candidate to take for each layer: the least sum of costs among all whose sizes sum up to `budget`
    at most; of equal costs the smaller sizes.

    costs, sizes  [layer][candidate], not negative; layers may have different numbers of candidates; an infinite cost or
                  size rules a candidate out. Whole numbers up to 2^53 are added without rounding.

    For the smallest sizes within a budget of costs, call it with the two exchanged. Raises ValueError where no choice
    fits, or the two tables do not match.
    """
    table = [_finite(cost, size) for cost, size in zip(costs, sizes, strict=True)]
    if any(len(index) == 0 for index, _, _ in table):
        raise ValueError("a layer has no candidate of finite cost and size")
    least = sum(float(size.min()) for _, _, size in table)
    if least > budget:
        raise ValueError(f"the smallest candidates take {least:g}, the budget is {budget:g}")
    multiplier, incumbent = _multiplier(table, budget)
    found = _best(table, budget, multiplier, sum(float(t[1][i]) for t, i in zip(table, incumbent, strict=True)))
    return [int(t[0][i]) for t, i in zip(table, incumbent if found is None else found, strict=True)]


def _finite(cost: Sequence[float], size: Sequence[float]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Indices, costs and sizes of the candidates that may be taken."""
    costs, sizes = np.asarray(cost, np.float64), np.asarray(size, np.float64)
    if costs.shape != sizes.shape or costs.ndim != 1:
        raise ValueError(f"expected a cost and a size for each candidate, found {costs.shape} and {sizes.shape}")
    if np.isnan(costs).any() or np.isnan(sizes).any() or (costs < 0).any() or (sizes < 0).any():
        raise ValueError("costs and sizes must be numbers that are not negative")
    index = np.flatnonzero(np.isfinite(costs) & np.isfinite(sizes))
    return index, costs[index], sizes[index]


_Table = list[tuple[NDArray[np.int64], Floats, Floats]]


def _multiplier(table: _Table, budget: float) -> tuple[float, list[int]]:
    """The price of size at which choosing layer by layer just fits, and that choice: feasible, seldom far from best."""

    def at(price: float) -> tuple[list[int], float]:
        picks = [int(np.lexsort((size, cost + price * size))[0]) for _, cost, size in table]
        return picks, sum(float(size[i]) for (_, _, size), i in zip(table, picks, strict=True))

    picks, total = at(0.0)
    if total <= budget:
        return 0.0, picks
    smallest = [int(np.lexsort((cost, size))[0]) for _, cost, size in table]
    low, high, chosen = 0.0, 1.0, smallest
    for _ in range(2 * _BISECTIONS):
        picks, total = at(high)
        if total <= budget:
            chosen = picks
            break
        low, high = high, 4 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        picks, total = at(middle)
        if total <= budget:
            high, chosen = middle, picks
        else:
            low = middle
    return high, chosen


def _best(table: _Table, budget: float, price: float, incumbent: float) -> list[int] | None:
    """The best choice, or None where nothing is found that beats or equals a total cost of `incumbent`."""
    # What the layers from one on take at least, alone and priced.
    rest_size = np.cumsum([0.0, *(float(size.min()) for _, _, size in reversed(table))])[::-1]
    rest_priced = np.cumsum([0.0, *(float((cost + price * size).min()) for _, cost, size in reversed(table))])[::-1]
    # The bound is a sum in another order than the costs it is compared with.
    limit = incumbent + 1e-9 * (abs(incumbent) + price * budget)
    costs, sizes = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
    for layer, (_, cost, size) in enumerate(table):
        count = len(cost)
        costs, sizes = (costs[:, None] + cost).ravel(), (sizes[:, None] + size).ravel()
        fits = sizes + rest_size[layer + 1] <= budget
        hopeful = costs + price * (sizes - budget) + rest_priced[layer + 1] <= limit
        kept = np.flatnonzero(fits & hopeful)
        kept = kept[np.lexsort((costs[kept], sizes[kept]))]
        # By growing size: only what is cheaper than everything smaller can be part of a best choice.
        before = np.concatenate([[np.inf], np.minimum.accumulate(costs[kept])[:-1]]) if len(kept) else costs[kept]
        kept = kept[costs[kept] < before]
        if not len(kept):
            return None
        costs, sizes = costs[kept], sizes[kept]
        steps.append(((kept // count).astype(np.int32), (kept % count).astype(np.int32)))
    state, picks = len(costs) - 1, []
    for parent, candidate in reversed(steps):
        picks.append(int(candidate[state]))
        state = int(parent[state])
    return picks[::-1]
