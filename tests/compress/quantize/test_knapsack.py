"""The knapsack against trying everything."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.quantize.knapsack import choose

Table = list[list[float]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Table, Table, float]:
    """Up to 6 layers of up to 4 candidates; whole numbers, so that sums have no rounding, and many ties."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = st.integers(0, 12).map(float)
    costs, sizes = ([[draw(numbers) for _ in range(count)] for count in counts] for _ in range(2))
    return costs, sizes, draw(st.integers(0, 60).map(float))


def totals(costs: Table, sizes: Table, picks: tuple[int, ...] | list[int]) -> tuple[float, float]:
    return sum(row[i] for row, i in zip(costs, picks, strict=True)), sum(
        row[i] for row, i in zip(sizes, picks, strict=True)
    )


@given(problems())
def test_no_choice_is_better(problem: tuple[Table, Table, float]) -> None:
    costs, sizes, budget = problem
    everything = [totals(costs, sizes, picks) for picks in itertools.product(*(range(len(row)) for row in costs))]
    fitting = [(cost, size) for cost, size in everything if size <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="the smallest candidates"):
            choose(costs, sizes, budget)
        return
    assert totals(costs, sizes, choose(costs, sizes, budget)) == min(fitting)


@given(problems())
def test_a_budget_of_costs_is_the_same_with_the_tables_exchanged(problem: tuple[Table, Table, float]) -> None:
    costs, sizes, budget = problem
    if sum(map(min, costs)) > budget:
        return
    cost, size = totals(costs, sizes, choose(sizes, costs, budget))
    assert cost <= budget
    # Within the size that was found, nothing costs more than the budget allowed; one byte less does not fit.
    assert totals(costs, sizes, choose(costs, sizes, size))[0] <= budget
    if sum(map(min, sizes)) <= size - 1:
        assert totals(costs, sizes, choose(costs, sizes, size - 1))[0] > budget


def test_real_sizes_and_costs() -> None:
    """Four times 56 layers of TinyLlama's shapes: exact within the memory of a laptop, and never above the budget."""
    rng = np.random.default_rng(0)
    shapes = [2048 * 2048, 2048 * 256, 2048 * 5632, 5632 * 2048] * 56
    bits = np.array([2.25, 3.125, 4.125, 8.008])
    sizes = [(n * bits).round().tolist() for n in shapes]
    costs = [(rng.lognormal(0, 1.5) * n * 4.0**-bits).tolist() for n in shapes]
    budget = 4.5 * sum(shapes)
    picks = choose(costs, sizes, budget)
    cost, size = totals(costs, sizes, picks)
    assert size <= budget
    uniform = totals(costs, sizes, [2] * len(shapes))
    assert cost < 0.5 * uniform[0]
    # No exchange of two layers' candidates that still fits is better.
    for _ in range(2000):
        a, b = rng.choice(len(shapes), 2, replace=False)
        other = list(picks)
        other[a], other[b] = rng.integers(4, size=2)
        new_cost, new_size = totals(costs, sizes, other)
        assert new_size > budget or new_cost >= cost * (1 - 1e-12)


def test_candidates_that_are_ruled_out() -> None:
    inf = float("inf")
    assert choose([[inf, 5.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, inf]], 10) == [1, 0]
    with pytest.raises(ValueError, match="no candidate"):
        choose([[inf, 5.0]], [[1.0, inf]], 10)
    with pytest.raises(ValueError, match="not negative"):
        choose([[-1.0]], [[1.0]], 10)
    with pytest.raises(ValueError, match="for each candidate"):
        choose([[1.0, 2.0]], [[1.0]], 10)
    assert choose([], [], 0) == []
