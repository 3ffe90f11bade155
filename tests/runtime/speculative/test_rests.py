"""Drafters that pay are not left to rest for long because their first drafts were wrong by chance."""

import numpy as np
import pytest

from runtime.speculative.draft_length import Controller
from tests.runtime.speculative.simulation import per_token, simulate

# Right first tokens of drafts, and those behind right ones, which are more often right where text is copied.
_FIRST, _LATER = 0.4, 0.85


def _copied(gamma: int, rng: np.random.Generator) -> int:
    return 1 + per_token(_LATER)(gamma - 1, rng) if rng.random() < _FIRST else 0


def _dear_beginning(width: int) -> float:
    """A small model's forward: to draft at all costs more than a token brings, tokens beyond the first cost little."""
    return 1.0 if width == 1 else 1.45 + 0.08 * (width - 2)


@pytest.mark.parametrize(("noise", "least"), [(0.05, 1.34), (0.3, 1.26)])
def test_a_drafter_that_pays_is_found_out_in_hundreds_of_rounds(noise: float, least: float) -> None:
    speeds, resting = [], 0
    for seed in range(24):
        speed, chosen = simulate(Controller(), 1500, _copied, 0.0, _dear_beginning, seed=seed, noise=noise)
        speeds.append(speed)
        resting += np.mean([gamma == 0 for gamma in chosen[-300:]]) > 0.9
    assert resting <= 1 and np.mean(speeds) > least
