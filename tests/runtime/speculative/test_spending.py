"""What finding out may cost, in numbers."""

import pytest

from runtime.speculative.measured import Drafted, Round
from runtime.speculative.spending import (
    CREDIT,
    LEAST_CREDIT,
    PROBING,
    TRIED,
    TRYING,
    Spending,
    lost_in_trying,
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


def test_the_first_rounds_may_cost_more_than_later_ones() -> None:
    """Rounds of half a second: what they may cost grows by both shares, and then by one."""
    spent, left = Spending(), []
    spent.begin(64)
    for rounds in (10, 200, 400, TRIED, 2 * TRIED, 3 * TRIED):
        spent.seconds = 0.5 * rounds
        left.append(spent.left_for_drafts(0.5) / 0.5)
    assert left[0] == pytest.approx(TRYING * 64 + 10 * PROBING)
    assert left[2] - left[1] == pytest.approx(200 * (PROBING + TRYING))
    assert left[4] - left[3] == left[5] - left[4] == pytest.approx(TRIED * PROBING)


@pytest.mark.parametrize("missing", [8, 200, 10_000])
@pytest.mark.parametrize("before", [0, 150, TRIED - 1, 5 * TRIED])
@pytest.mark.parametrize("lost", [0.5, 3.0, 11.0, 40.0])
def test_what_was_spent_is_gone_until_time_has_passed(missing: int, before: int, lost: float) -> None:
    spent, plain = Spending(), 2.0
    spent.begin(missing)
    spent.seconds = before * plain
    spent.probing = 1.5 * plain + max(0.0, spent.left_for_drafts(plain))
    rounds = spent.rounds_until(lost * plain, plain)
    spent.seconds = (before + rounds) * plain
    assert spent.left_for_drafts(plain) >= (lost - 1e-9) * plain
    spent.seconds -= plain
    assert rounds > 0 and spent.left_for_drafts(plain) < lost * plain
    assert spent.rounds_until(-1e9, plain) == 0 and spent.rounds_until(lost, 0.0) == 0


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
