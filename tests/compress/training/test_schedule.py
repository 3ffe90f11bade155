"""Learning rate schedules."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe.training import Settings
from compress.training.schedule import learning_rate_at

SHARES = st.floats(0, 1)


def shares(steps: int, schedule: str, warmup: float, decay: float, floor: float) -> list[float]:
    keys: dict[str, Any] = {"schedule": schedule, "warmup": warmup, "decay": decay, "min_lr_ratio": floor}
    return [learning_rate_at(step, steps, Settings(learning_rate=1.0, **keys)) for step in range(steps)]


def test_cosine_by_hand() -> None:
    found = shares(11, "cosine", 0.2, 0.3, 0.1)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[6] == pytest.approx(0.55)
    assert found[10] == pytest.approx(0.1)


def test_wsd_by_hand() -> None:
    found = shares(10, "wsd", 0.1, 0.4, 0.2)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@given(st.integers(1, 300), SHARES, SHARES, SHARES)
def test_up_then_down_within_bounds(steps: int, warmup: float, decay: float, floor: float) -> None:
    for schedule in ("cosine", "wsd"):
        found = shares(steps, schedule, warmup, decay, floor)
        assert all(0 <= value <= 1 + 1e-12 for value in found)
        top = found.index(max(found))
        assert found[: top + 1] == sorted(found[: top + 1])
        assert all(a >= b - 1e-12 for a, b in zip(found[top:], found[top + 1 :], strict=False))


def test_a_step_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 9, found 10"):
        learning_rate_at(10, 10, Settings())
