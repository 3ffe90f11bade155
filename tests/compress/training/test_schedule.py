"""Learning rate schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe.training import Settings
from compress.training.schedule import cosine, share, warmup_stable_decay

SHARES = st.floats(0, 1)


def test_cosine_by_hand() -> None:
    found = [cosine(step, 11, 0.2, 0.1) for step in range(11)]
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[6] == pytest.approx(0.55)
    assert found[10] == pytest.approx(0.1)


def test_wsd_by_hand() -> None:
    found = [warmup_stable_decay(step, 10, 0.1, 0.4, 0.2) for step in range(10)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@given(st.integers(1, 300), SHARES, SHARES, SHARES)
def test_up_then_down_within_bounds(steps: int, warmup: float, decay: float, floor: float) -> None:
    for schedule in ("cosine", "wsd"):
        settings = Settings(schedule=schedule, warmup=warmup, decay=decay, min_lr_ratio=floor)  # type: ignore[arg-type]
        found = [share(step, steps, settings) for step in range(steps)]
        assert all(0 <= value <= 1 + 1e-12 for value in found)
        top = found.index(max(found))
        assert found[: top + 1] == sorted(found[: top + 1])
        assert all(a >= b - 1e-12 for a, b in zip(found[top:], found[top + 1 :], strict=False))


def test_a_step_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 9, found 10"):
        cosine(10, 10, 0.1, 0.1)
