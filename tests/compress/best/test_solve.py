"""The solver against trying everything."""

import itertools
import random

import pytest

from compress.best.solve import InfeasibleError, solve


def brute(costs: list[list[float]], uses: list[list[list[float]]], limits: list[float]) -> float | None:
    """The least cost of all choices that fit."""
    best = None
    for picks in itertools.product(*(range(len(row)) for row in costs)):
        within = all(
            sum(use[u][p] for u, p in enumerate(picks)) <= limit for use, limit in zip(uses, limits, strict=True)
        )
        cost = sum(costs[u][p] for u, p in enumerate(picks))
        if within and (best is None or cost < best):
            best = cost
    return best


def test_the_solver_finds_what_brute_force_finds() -> None:
    drawn, infeasible, budgets = random.Random(0), 0, set()
    for _ in range(500):
        options = [drawn.randint(1, 4) for _ in range(drawn.randint(1, 6))]
        count = drawn.randint(1, 3)
        budgets.add(count)
        table = lambda sizes=options: [[float(drawn.randint(0, 30)) for _ in range(n)] for n in sizes]  # noqa: E731
        costs, uses = table(), [table() for _ in range(count)]
        limits = [drawn.uniform(0.35, 1.0) * sum(map(max, use)) for use in uses]
        wanted = brute(costs, uses, limits)
        if wanted is None:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                solve(costs, uses, limits)
            continue
        found = solve(costs, uses, limits)
        assert found.exact and found.cost == pytest.approx(wanted, abs=1e-9)
        for use, limit in zip(uses, limits, strict=True):
            assert sum(row[p] for row, p in zip(use, found.picks, strict=True)) <= limit + 1e-9
    assert budgets == {1, 2, 3} and 20 < infeasible < 300


def test_a_solution_that_may_not_be_the_best_says_so() -> None:
    drawn = random.Random(1)
    table = lambda: [[drawn.random() for _ in range(8)] for _ in range(12)]  # noqa: E731
    costs, uses = table(), [table(), table()]
    limits = [0.45 * sum(map(max, use)) for use in uses]
    best, quick = solve(costs, uses, limits), solve(costs, uses, limits, most=4)
    assert best.exact and not quick.exact and quick.cost >= best.cost


def test_without_a_budget_that_binds_each_unit_takes_its_cheapest() -> None:
    assert solve([[2.0, 1.0], [0.0, 5.0]], [[[1.0, 9.0], [9.0, 1.0]]], [18.0]).picks == (1, 0)
