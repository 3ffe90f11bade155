"""What is known of a drafter from elsewhere, and the times of rounds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.speculative.measured import Drafted, Gains, Times, round_rates
from tests.runtime.speculative.simulation import flat, known, wavering


@pytest.mark.parametrize("unit", [1e-4, 0.3])
def test_a_priors_times_become_seconds(unit: float) -> None:
    """Of the middle one of the first rounds: a first forward of all that is slow says little."""
    times = Times(known(0.8, flat))
    for slow in (2.0, 1.0, 1.0):
        times.add_target(3, slow * unit * flat(3))
    assert times.target(9) == pytest.approx(unit * flat(9))
    assert times.drafting(1, 4) == pytest.approx(unit * 0.19)
    assert times.drafting(1, 0) == 0.0


@pytest.mark.parametrize(
    "changes", [{"accepted": ()}, {"accepted": (1.2,)}, {"length": 0}, {"drafting": 0.0}, {"widths": {2: 1.0}}]
)
def test_what_no_drafter_can_have_is_no_prior(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no drafter can have"):
        replace(known(0.5, flat), **changes)


def test_drafting_takes_what_it_takes_on_average_where_few_rounds_are_dear() -> None:
    """Of lookup and a model behind it, which is asked in one round of four and takes a hundred times as long."""
    times, rng = Times(), np.random.default_rng(0)
    for round_ in range(400):
        dear = round_ % 4 == 0
        times.add_drafting(1, 4, (1.0 if dear else 0.01) * rng.lognormal(0, 0.05), asked=2 if dear else 1)
    assert times.drafting(1, 4) == pytest.approx(0.25, rel=0.15)
    assert times.drafting(1, 4, 1) == pytest.approx(0.01, rel=0.1) and times.drafting(1, 4, 2) == pytest.approx(
        1, rel=0.1
    )


def test_what_is_seldom_seen_is_not_taken_for_dearer_and_dearer() -> None:
    """On a machine that wavers, and is slow now and then: the pace follows from times that are kept at a pace."""
    times, paces = Times(), wavering(3)
    for width in (1, 5):
        for _ in range(8):
            times.add_target(width, flat(width))
    for _ in range(5000):
        times.add_target(3, flat(3) * next(paces))
    assert times.target(5) / times.target(3) < 2 and times.target(1) / times.target(3) > 0.4


@pytest.mark.parametrize(("lengths", "dearer"), [([4], 1.0), ([0, 8], 1.2)])
def test_drafts_of_uneven_length_cost_more_where_rows_grow_dearer(lengths: list[int], dearer: float) -> None:
    """The same number of rows on average: four in each round, or eight in every other one."""

    def forward(width: int) -> float:
        return 1 + 0.05 * width**2

    times, gains = Times(), Gains()
    for round_ in range(400):
        length = lengths[round_ % len(lengths)]
        gains.add(8, [Drafted(length, min(1, length))])
        for width in range(1, 10):
            times.add_target(width, forward(width))
    mean = np.mean([forward(1 + length) for length in lengths])
    gained = 1 + np.mean([min(1, length) for length in lengths])
    assert round_rates(times, gains, 1, 8)[8] == pytest.approx(gained / mean, rel=0.1)
    assert mean >= dearer * forward(5)


@pytest.mark.parametrize("batch", [1, 3])
def test_where_no_draft_can_pay_only_short_ones_are_worked_out(batch: int) -> None:
    times, gains = Times(), Gains()
    for _ in range(40):
        gains.add(16, [Drafted(16, 0)])
        times.add_drafting(batch, 16, 1.0)
        for width in range(batch, 17 * batch + 1, batch):
            times.add_target(width, 1.0)
    rates = round_rates(times, gains, batch, 16)
    assert 1 < len(rates) < 17 and max(rates) == rates[0] == pytest.approx(batch)
    # Drafts that cost nothing might pay, and so all are worked out; to where both are there they are the same.
    for _ in range(40):
        times.add_drafting(batch, 16, 0.0)
    assert len(round_rates(times, gains, batch, 16)) == 17
    assert round_rates(times, gains, batch, 3) == pytest.approx(round_rates(times, gains, batch, 16)[:4])


def test_a_later_drafters_first_draft_does_not_count() -> None:
    """It reads the text for it, as the first drafter of a chain is known to."""
    times = Times()
    times.add_drafting(1, 4, 0.1)
    times.add_drafting(1, 4, 9.0, asked=2)
    assert times.begun(2) and not times.begun(3) and not times.timed(2)
    assert times.drafting(1, 4) == pytest.approx(0.1)
    times.add_drafting(1, 4, 0.5, 0.5, asked=2)
    times.add_drafting(1, 4, 9.0, 0.7, 0.7, asked=3)
    assert times.drafting(1, 4, 2) == pytest.approx(0.5) and times.drafting(1, 4, 3) == pytest.approx(0.7)
