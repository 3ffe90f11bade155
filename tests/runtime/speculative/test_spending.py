"""What finding out may cost, in numbers."""

import pytest

from runtime.speculative.measured import Drafted, Round
from runtime.speculative.spending import (
    CREDIT,
    LEAST_CREDIT,
    PROBING,
    TRYING,
    Spending,
    lost_in_trying,
    rounds_until,
)


@pytest.mark.parametrize(("missing", "credit"), [(8, LEAST_CREDIT), (200, TRYING * 200), (10_000, CREDIT)])
def test_the_credit_is_a_share_of_the_first_text(missing: int, credit: float) -> None:
    spent = Spending()
    spent.begin(missing)
    assert spent.left_for_drafts(0.5) == pytest.approx(credit * 0.5)


def test_choosing_takes_what_it_took_where_it_was_timed() -> None:
    spent = Spending()
    for seconds, asking in ((1.0, 0.0), (1.0, 0.2), (2.0, 0.0), (1.0, 0.3)):
        spent.took(seconds, asking)
    assert spent.seconds == 5.0 and 0.2 < spent.asking < 0.3


def test_what_was_spent_is_gone_until_time_has_passed() -> None:
    spent = Spending()
    spent.begin(200)
    spent.probing = 3.0
    lacking = -spent.left_for_drafts(1.0)
    rounds = rounds_until(lacking, 1.0)
    assert lacking > 0 and rounds > 0
    spent.seconds = rounds - 1.0
    assert spent.left_for_drafts(1.0) < 0
    spent.seconds = rounds
    assert spent.left_for_drafts(1.0) == pytest.approx(0, abs=PROBING)
    assert rounds_until(-1.0, 1.0) == 0 and rounds_until(1.0, 0.0) == 0


def test_what_a_first_draft_lost_is_bounded_by_what_is_known() -> None:
    """Plain rounds of 1 second: three rows that take 1.2, a draft of 0.5, and choosing, 0.1."""
    found = Round(1, 2, (Drafted(2, 0),), 3, 0.5, 1.2, asking=0.1)
    assert lost_in_trying(found, 1.0, 9.0, reads=False) == pytest.approx(0.8)
    assert lost_in_trying(found, 1.0, 9.0, reads=True) == pytest.approx(0.3)
    assert lost_in_trying(found, 1.0, 1.1, reads=True) == pytest.approx(0.2)
    # The machine was elsewhere, or the draft was right.
    slow = found._replace(draft_seconds=70.0, target_seconds=80.0)
    assert lost_in_trying(slow, 1.0, 9.0, reads=False) == pytest.approx(3.0 + 2.0 + 0.1 - 1.0)
    assert lost_in_trying(found._replace(drafts=(Drafted(2, 2),)), 1.0, 9.0, reads=False) == 0.0
