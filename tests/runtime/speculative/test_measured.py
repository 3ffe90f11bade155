"""What is known of a drafter from elsewhere, and the times of rounds."""

from dataclasses import replace
from typing import Any

import pytest

from runtime.speculative.measured import Times
from tests.runtime.speculative.simulation import flat, known


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
