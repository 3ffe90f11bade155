"""What drafting costs and brings, from what was seen of it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.speculative.estimates import WINDOW, Chain, Curve, Lengths, Tree
from tests.runtime.speculative.simulation import per_token


@given(st.dictionaries(st.integers(1, 30), st.floats(0.1, 10), min_size=1), st.floats(0, 60))
def test_a_curve_never_falls_and_never_grows_faster_than_the_work(points: dict[int, float], x: float) -> None:
    curve = Curve()
    for at, value in points.items():
        curve.add(at, value)
    assert curve.at(x) <= max(points.values()) * max(1, x / max(points)) + 1e-9
    found = [curve.at(at) for at in range(1, 61)]
    assert all(later >= sooner - 1e-9 for sooner, later in pairwise(found))
    assert found == curve.along(range(1, 61)) and [curve.at(x)] == curve.along((x,))
    assert Curve().at(x) == 0


@given(st.dictionaries(st.integers(1, 30), st.floats(1, 1.05), min_size=1))
def test_a_curve_goes_through_what_machines_can_take(noise: dict[int, float]) -> None:
    """Times that rise, and more slowly than the work."""
    curve, points = Curve(), {at: 1 + 0.4 * at for at in noise}
    for at, value in points.items():
        curve.add(at, value)
    assert [curve.at(at) for at in points] == pytest.approx(list(points.values()))


def test_of_neighbours_that_fall_the_one_measured_more_often_counts_more() -> None:
    curve = Curve()
    for seconds in [2.0] * 9:
        curve.add(4, seconds)
    curve.add(5, 1.0)
    assert curve.at(4) == curve.at(5) == pytest.approx(1.9)
    assert curve.at(3) == curve.at(4)


def test_rounds_in_which_the_machine_was_elsewhere_say_nothing() -> None:
    """Not even a first one: more rows do not take more than as many times as long."""
    curve = Curve()
    for seconds in (1.0, 5.0, 1.1, 1.0, 7.0, 1.2):
        curve.add(2, seconds)
    curve.add(5, 30.0)
    assert 1.0 <= curve.at(2) < 1.1
    assert curve.at(5) == pytest.approx(2.5 * curve.at(2))
    curve.add(5, 1.5)
    curve.add(5, 1.5)
    assert curve.at(5) == 1.5


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_a_chain_counts_its_depths(found: list[tuple[int, int]]) -> None:
    chain = Chain()
    for budget, accepted in found:
        chain.add(budget, min(accepted, budget))
    values = chain.tokens(12)
    assert values[0] == 0 and values == sorted(values) and all(b - a <= 1 for a, b in pairwise(values))
    # Each token is at most as likely as the one before it.
    steps = [b - a for a, b in pairwise(values)]
    assert all(a >= b - 1e-12 for a, b in pairwise(steps))


def test_many_chains_give_their_mean() -> None:
    rng, chain, tree = np.random.default_rng(3), Chain(), Tree()
    accept = per_token(0.6)
    found = [accept(6, rng) for _ in range(20_000)]
    for accepted in found:
        chain.add(6, accepted)
        tree.add(6, range(accepted))
    assert chain.tokens(6)[6] == pytest.approx(np.mean(found), rel=1e-3)
    assert tree.tokens(6)[6] == pytest.approx(np.mean(found), rel=1e-3) and tree.tokens(6)[0] == 0


@given(st.lists(st.tuples(st.integers(1, 16), st.sets(st.integers(0, 15))), max_size=30))
def test_of_larger_trees_no_fewer_tokens_are_expected(found: list[tuple[int, set[int]]]) -> None:
    tree = Tree()
    for budget, path in found:
        tree.fade()
        tree.add(budget, [node for node in path if node < budget])
    values = tree.tokens(20)
    assert values[0] == 0 and all(later >= sooner for sooner, later in pairwise(values))


def test_a_tree_tells_of_all_smaller_ones() -> None:
    """Of a first node that is right seven times in ten, and otherwise a second or a third one beside it."""
    rng, tree = np.random.default_rng(5), Tree()
    for _ in range(6000):
        draw = rng.random()
        tree.fade()
        tree.add(int(rng.integers(3, 9)), [0] if draw < 0.7 else [1] if draw < 0.9 else [2] if draw < 0.95 else [])
    assert tree.tokens(3)[1:] == pytest.approx([0.7, 0.9, 0.95], abs=0.09)
    # Larger ones have nothing that smaller ones have not.
    assert tree.tokens(8)[8] == pytest.approx(tree.tokens(3)[3], abs=0.05)


def test_what_is_known_of_trees_from_elsewhere() -> None:
    """Each doubling adds as much, beyond what was seen, too."""
    tree = Tree()
    tree.begin(7, 3.0)
    assert [tree.tokens(15)[nodes] for nodes in (1, 3, 7, 15)] == pytest.approx([1, 2, 3, 4], rel=0.2)


def test_lengths_of_drafts_that_find_little_or_end_by_themselves() -> None:
    lengths, rng = Lengths(), np.random.default_rng(4)
    for _ in range(5000):
        lengths.fade()
        budget = int(rng.integers(1, 9))
        lengths.add(budget, min(budget, 5) if rng.random() < 0.2 else 0)
    shares = lengths.shares(12)
    assert shares[:5] == pytest.approx([0.2] * 5, abs=0.1) and max(shares[5:]) < 0.02
    assert Lengths().shares(3) == [1.0, 1.0, 1.0]


def test_a_lookup_that_seldom_finds_anything() -> None:
    chain, rng = Chain(), np.random.default_rng(4)
    for _ in range(5000):
        chain.add(4, 3 * (rng.random() < 0.2))
    assert chain.tokens(4)[4] == pytest.approx(0.2 * 3, rel=0.1)


def test_a_first_slow_measurement_is_forgotten() -> None:
    curve = Curve()
    for seconds in (9.0, 1.0):
        curve.add(5, seconds)
    assert curve.at(5) == 1.0
    for seconds in [2.0] * WINDOW:
        curve.add(5, seconds)
    assert curve.at(5) == 2.0
