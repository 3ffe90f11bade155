"""Texts of a few hundred tokens, the first of their controllers above all: finding out costs little, and soon pays."""

from collections.abc import Callable

import numpy as np
import pytest

from runtime.speculative.draft_length import Controller
from tests.runtime.speculative.simulation import (
    LENGTH,
    bent,
    expected,
    flat,
    four_billion,
    known,
    linear,
    mixture,
    per_token,
    simulate,
    text,
    wavering,
)

# Tokens a round of seven drafted ones: code and chat, as DSpark's paper has them (2607.05147, table 1).
CODE, CHAT = 0.867, 0.745


@pytest.mark.parametrize("widths", [(), (1, 2, 3, 5)])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.4])
def test_of_a_mixture_the_first_texts_cost_little_too(p: float, widths: tuple[int, ...]) -> None:
    """500 rounds of a new engine, whether or not it begins with what forwards cost."""
    found = []
    for seed in range(8):
        controller = Controller(widths={width: mixture(width) for width in widths})
        found.append(simulate(controller, 500, per_token(p), 0.05, mixture, seed=seed)[0])
    assert np.mean(found) > 0.985 and min(found) > 0.97


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("forward", [flat, linear, mixture])
def test_in_a_short_first_text_a_useless_drafter_costs_two_percent(
    forward: Callable[[int], float], tokens: int
) -> None:
    """Trying out is a share of the text in which it is tried; means over 32 new engines."""
    took = [text(Controller(), 0.0, forward, seed, 0.05, tokens) for seed in range(32)]
    assert 1 < np.mean(took) / (tokens - 1) < 1.02


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize(("p", "forward"), [(0.7, flat), (0.9, flat), (0.9, mixture)])
def test_in_a_short_first_text_a_good_drafter_is_found_out(
    p: float, forward: Callable[[int], float], tokens: int
) -> None:
    """As soon as before trying out was bounded by the text's length."""
    took = np.mean([text(Controller(), p, forward, seed, 0.05, tokens) for seed in range(32)])
    fixed = min(np.mean([text(gamma, p, forward, seed, 0.0, tokens) for seed in range(32)]) for gamma in range(8))
    assert fixed / took > {64: 0.8, 128: 0.86, 256: 0.9}[tokens]


def nearness(texts: range, make: Callable[[], Controller], p: float, forward: Callable[[int], float]) -> float:
    """How near a chosen γ comes to the best fixed one in these texts of a controller, over several controllers."""
    controllers = range(36)
    fixed = min(
        sum(text(gamma, p, forward, 100 * one + number) for one in controllers for number in texts)
        for gamma in range(LENGTH + 1)
    )
    chosen = 0.0
    for one in controllers:
        controller = make()
        times = [text(controller, p, forward, 100 * one + number) for number in range(texts.stop)]
        chosen += sum(times[texts.start :])
    return fixed / chosen


@pytest.mark.slow
@pytest.mark.parametrize("forward", [flat, bent])
@pytest.mark.parametrize("p", [CODE, CHAT])
def test_in_short_texts_the_length_is_near_the_best(p: float, forward: Callable[[int], float]) -> None:
    """In those after the first, and in the first one where a report knows the drafter; without, trying out costs."""
    # Where rows beyond the sixth are dear, longer drafts while little is known cost half a percent, and that a choice
    # stays from text to text, which small models gain much by, one and a half.
    assert nearness(range(1, 5), Controller, p, forward) > (0.96 if forward is flat else 0.93)
    first = nearness(range(1), Controller, p, forward)
    begun = nearness(range(1), lambda: Controller(prior=known(p, forward)), p, forward)
    assert begun > 0.92 and (0.9 if forward is flat else 0.88) < first < begun + 0.02


def test_with_what_is_known_of_a_drafter_the_first_round_drafts() -> None:
    """As much as that finds best; without, the first rounds try out."""
    prior = known(0.9, flat)
    assert Controller().next_budget(1, 100).budget == 0
    assert Controller(prior=prior).next_budget(1, 100).budget > 4
    assert Controller(prior=known(0.1, lambda width: float(width))).next_budget(1, 100).budget == 0


def test_a_wrong_prior_is_found_out() -> None:
    """A drafter that was good elsewhere and is never right here is soon left alone."""
    found, chosen = simulate(Controller(prior=known(0.9, flat)), 512, per_token(0.0), 0.05, flat)
    assert chosen[0] > 4 and np.mean(chosen[-200:]) < 0.2
    assert found > 0.94 * expected(0, 0, 0.05, flat)


@pytest.mark.parametrize("step", [0.05, 0.3])
def test_a_useless_drafter_costs_little_from_the_beginning(step: float) -> None:
    """A first text of 512 tokens; the opening and the looks after it are all that drafting takes."""
    found, chosen = simulate(Controller(), 512, per_token(0.0), step, flat)
    assert found > 0.985 * expected(0, 0, step, flat) and max(chosen) > 0


@pytest.mark.parametrize("p", [0.0, 0.9])
def test_a_first_batch_that_is_large_is_not_slowed_by_finding_out(p: float) -> None:
    """Two hundred rounds of sixteen requests, the first of all: as long as a short text."""
    plain = expected(0, 0, 0.05, linear, 16)
    found, _ = simulate(Controller(), 200, per_token(p), 0.05, linear, 16)
    assert found > 0.96 * plain


@pytest.mark.parametrize("p", [CODE, CHAT])
def test_where_rows_were_timed_first_texts_are_near_the_best_on_a_machine_that_wavers(p: float) -> None:
    """As a server's: no round without a draft comes first, and first drafts are long where rows are cheap."""
    seeds = range(48)
    fixed = min(np.mean([text(gamma, p, four_billion, seed) for seed in seeds]) for gamma in range(LENGTH + 1))
    costs = {width: four_billion(width) for width in (1, 2, 3, 5)}

    def near(costs: dict[int, float]) -> float:
        took = [text(Controller(widths=costs), p, four_billion, seed, 0.03, paces=wavering(seed + 7)) for seed in seeds]
        return float(fixed / np.mean(took))

    assert near(costs) > 0.95 and near(costs) > near({})


def test_first_drafts_are_as_long_as_trying_out_affords() -> None:
    """Where rows are cheap, longer and longer ones, though nothing is accepted; where they are dear, none after few."""

    def lengths(forward: Callable[[int], float]) -> list[int]:
        controller = Controller(widths={width: forward(width) for width in (1, 2, 3, 5)})
        return simulate(controller, 12, per_token(0.0), 0.02, forward, noise=0.0)[1]

    cheap, dear = lengths(four_billion), lengths(linear)
    assert cheap[:3] == [2, 5, 11]
    assert dear[:3] == [2, 1, 0]
    assert Controller().next_budget(1, 200).budget == 0  # without these costs what not drafting takes comes first
