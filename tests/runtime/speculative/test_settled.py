"""Rounds of a choice that holds are taken in together, and say what they would have said one by one."""

import numpy as np
import pytest

from runtime.speculative.draft_length import Controller
from runtime.speculative.estimates import Chain, Lengths, Tree
from runtime.speculative.measured import Drafted, Round, Times
from runtime.speculative.settled import TOGETHER, Settled, beside, surprising
from tests.runtime.speculative.simulation import flat, per_token, simulate


def a_round(budget: int, accepted: int) -> Round:
    return Round(1, budget, (Drafted(budget, accepted),), 1 + budget, 0.1, 1.0)


def test_counts_of_many_are_those_of_each() -> None:
    rng = np.random.default_rng(2)
    accepted = [int(rng.integers(0, 6)) for _ in range(50)]
    for kind in (Chain, Lengths):
        each, together = kind(), kind()
        for count in accepted:
            each.add(5, count)
        together.add(5, *accepted)
        assert together.hits == each.hits and together.tries == each.tries and 0 < each.hits[4] < each.hits[0]
    trees, at_once, paths = Tree(), Tree(), [[0, 2], [], [1, 3, 4], [0]]
    for path in paths:
        trees.add(5, path)
    at_once.add(5, *paths)
    assert at_once.hits == trees.hits == [2, 1, 1, 1, 1] and at_once.tries == trees.tries == [4] * 5


def test_times_of_many_rounds_are_those_of_each() -> None:
    rng, each, together = np.random.default_rng(1), Times(), Times()
    rounds = [
        Round(1, 4, (), 2 + i % 2, 0.1 * rng.lognormal(0, 0.1), (1 + 0.3 * (i % 2)) * rng.lognormal(0, 0.1))
        for i in range(64)
    ]
    for one in rounds:
        each.add((one,))
    for first in range(0, 64, 16):
        together.add(rounds[first : first + 16])
    for width in (2, 3):
        assert together.target(width) == pytest.approx(each.target(width), rel=0.06)
    assert together.target(3) > 1.2 * together.target(2)
    assert together.drafting(1, 4) == pytest.approx(each.drafting(1, 4), rel=0.06)


def test_what_holds_near_the_end_of_a_text_is_the_best_there_is_room_for() -> None:
    held = Settled(1, 16, 6, until=40, rates=[1.0, 0.7, 1.1, 1.2, 1.3, 1.35, 1.4, 1.3])
    assert [held.within(most) for most in (9, 6, 4, 1, 0)] == [6, 6, 4, 0, 0]
    assert held.holds(1, 16, 39) and not held.holds(1, 16, 40) and not held.holds(2, 16, 39)
    assert held.holds(1, 3, 44)  # rather than to choose for its last rounds
    assert not held.holds(1, 3, 60)
    forced = Settled(1, 4, 4, until=40, rates=[1.0] * 5)
    assert forced.holds(1, 4, 30) and not forced.holds(1, 16, 30)


def test_longer_and_shorter_drafts_are_looked_at_by_turns() -> None:
    found, last = [], 0
    for _ in range(4):
        last = beside(6, 16, last)
        found.append(last)
    assert found == [8, 4, 8, 4]
    assert [beside(16, 16, last) for last in (0, 11)] == [11, 11]  # nothing longer may be drafted
    assert [beside(1, 16, last) for last in (0, 2)] == [2, 2] and beside(0, 16, 0) == 0


def test_times_that_are_out_of_date_do_not_keep_from_shorter_drafts() -> None:
    """Five rows take no longer than one, but did while the first of them were timed: γ is 2, and 4 would be best."""
    slow = [True]

    def forward(width: int) -> float:
        return 2.0 if slow[0] and width in (4, 5) else 1.0 if width <= 5 else 1.0 + 0.5 * (width - 5)

    controller = Controller(limit=8)
    simulate(controller, 60, per_token(0.9), 0.02, forward)
    slow[0] = False
    _, chosen = simulate(controller, 3000, per_token(0.9), 0.02, forward, seed=1)
    assert np.median(chosen[-200:]) in (3, 4, 5)


def test_only_much_better_or_much_worse_drafts_are_a_surprise() -> None:
    rng, accept, tokens = np.random.default_rng(0), per_token(0.8), [0.0, 0.8, 1.44, 1.952, 2.362]

    def share(p: float) -> float:
        draw = accept if p == 0.8 else per_token(p)
        return float(
            np.mean([surprising([a_round(4, draw(4, rng)) for _ in range(TOGETHER)], tokens) for _ in range(400)])
        )

    assert share(0.8) < 0.02
    assert share(0.2) > 0.9 and share(1.0) > 0.9


def test_drafts_that_become_wrong_end_a_long_hold_at_once() -> None:
    """Within a few groups of rounds, where a choice may hold for hundreds."""
    controller = Controller(limit=6)
    _, chosen = simulate(controller, 1500, per_token(0.9), 0.3, flat)
    assert np.mean(chosen[-100:]) > 3
    _, chosen = simulate(controller, 120, per_token(0.0), 0.3, flat, seed=1)
    assert np.mean(chosen[:8]) > 3 and np.mean(chosen[60:]) < 3
