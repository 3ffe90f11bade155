import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.advice import (
    MAX_DRAFT_LENGTH,
    advise,
    band,
    expected_speedup,
    fit_acceptance,
    iid_speedup,
    settled,
    tokens_per_round,
)
from compress.report.schema_speed import Pairing
from runtime.engine.metrics import predicted_speedup
from runtime.speculative.costs import width_cost

FLAT = {1: 1.0, 2: 1.02, 5: 1.08, 9: 1.15, 17: 1.3}
LINEAR = {1: 1.0, 5: 5.0, 17: 17.0}


def independent(p: float, length: int) -> list[float]:
    return [p**i for i in range(1, length + 1)]


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.7, "7 to 10"), (0.69, "3 to 5"), (0.5, "3 to 5"), (0.49, "another draft or none")]
)
def test_bands(rate: float, expected: str) -> None:
    assert band(rate) == expected


@given(st.floats(0.05, 0.99), st.integers(1, 12))
def test_the_fit_finds_the_probability_of_independent_tokens(p: float, length: int) -> None:
    survival = independent(p, length)
    assert fit_acceptance(survival) == pytest.approx(p)
    # One draft's tokens are 1 + p + p² + …, continued where nothing was measured.
    for other in (0, 1, length, length + 3):
        assert tokens_per_round(survival, other) == pytest.approx(sum(p**i for i in range(other + 1)))


@given(st.floats(0.05, 0.99), st.integers(0, 16), st.floats(0.0, 1.0), st.floats(1.0, 4.0))
def test_the_textbook_form_is_the_prediction_for_independent_tokens(p: float, length: int, c: float, v: float) -> None:
    tau = sum(p**i for i in range(length + 1))
    assert iid_speedup(p, length, c, v) == pytest.approx(predicted_speedup(tau, length, c, v))


def test_the_textbook_form_at_certainty() -> None:
    assert iid_speedup(1.0, 4, 0.1, 1.2) == pytest.approx(5 / 1.6)


def test_the_docs_example_of_a_rate_that_is_no_probability() -> None:
    # At γ = 4 a per-token probability of 0.81 gives α = 0.6.
    assert sum(independent(0.81, 4)) / 4 == pytest.approx(0.6, abs=0.01)


def test_width_costs_between_and_beyond_what_was_measured() -> None:
    widths = {2: 1.2, 5: 1.5, 9: 2.5}
    assert width_cost(widths, 1) == 1.0
    assert width_cost(widths, 5) == 1.5
    assert width_cost(widths, 3) == pytest.approx(1.3)
    assert width_cost(widths, 17) == pytest.approx(4.5)
    assert width_cost({}, 7) == 1.0


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 2.0), st.floats(0.0, 0.3))
def test_the_advice_is_the_best_draft_length_there_is(shares: list[float], c: float, slope: float) -> None:
    survival = sorted(shares, reverse=True)
    widths = {w: 1 + slope * (w - 1) for w in (1, 2, 3, 5, 9, 17)}
    advice = advise(sum(survival) / len(survival), survival, c, widths)
    speeds = [expected_speedup(survival, length, c, widths) for length in range(MAX_DRAFT_LENGTH + 1)]
    assert speeds[advice.draft_length] * 1.01 >= max(speeds)
    assert (advice.draft_length == 0) == (max(speeds) <= 1.01)


def test_a_good_cheap_draft_is_advised_to_draft_long() -> None:
    advice = advise(0.8, independent(0.95, 4), 0.05, FLAT)
    assert advice.band == "7 to 10"
    assert advice.draft_length > 6
    assert "extrapolated" in advice.why
    assert f"{advice.draft_length} drafted tokens give" in advice.why


def test_the_measured_costs_overrule_the_band() -> None:
    """The same acceptance: worth it where wide forwards are cheap, not where they cost their width."""
    survival = independent(0.8, 4)
    alpha = sum(survival) / 4
    assert advise(alpha, survival, 0.1, FLAT).draft_length > 2
    refused = advise(alpha, survival, 0.1, LINEAR)
    assert refused.band == "3 to 5"
    assert refused.draft_length == 0
    assert "does not pay" in refused.why


def test_a_bad_draft_is_refused_by_band_and_costs() -> None:
    refused = advise(0.05, [0.15, 0.03, 0.01, 0.0], 0.3, FLAT)
    assert refused.model_dump() == {"band": "another draft or none", "draft_length": 0, "why": refused.why}


def test_what_was_timed_is_the_advice() -> None:
    nothing: dict[str, Any] = dict.fromkeys(Pairing.model_fields)
    row = Pairing(**nothing | {"drafter": "suffix", "speedup": 1.29, "acceptance_rate": 0.74, "draft_length": 1.4})
    found = settled(row, 3, chosen=True)
    assert (found.band, found.draft_length) == ("7 to 10", 3)
    assert "the drafter suffix with γ chosen every round, 1.4 on average, gave 1.29 times" in found.why
    refused = settled(row, 0, chosen=False)
    assert refused.draft_length == 0 and "does not pay on this machine" in refused.why


def test_no_positions_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="no drafted position"):
        fit_acceptance([])
    assert math.isclose(tokens_per_round([], 3), 1.0)
