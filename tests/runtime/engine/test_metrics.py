"""Figures from counts: histograms, percentiles, predictions, and the table of them."""

import random

import pytest

from runtime.engine.metrics import Metrics, predicted_speedup, total


def spoken() -> Metrics:
    """Three rounds that drafted 2, 0 and 2 tokens, of which 2 and 1 were accepted; the target takes 0.1 s a round."""
    metrics = Metrics(requests=1, rounds=3, gained=6, target_forwards=3, target_rows=7, target_seconds=0.3)
    metrics.count_draft([0, 1], [0, 1])
    metrics.count_draft([], [])
    metrics.count_draft([0, 1], [0])
    metrics.first_seconds, metrics.first_drafted = 0.04, 2
    metrics.draft_seconds, metrics.arrivals, metrics.kv_bytes = 0.08, [[0.5, 0.6, 0.6, 0.6, 0.7, 0.8, 0.8]], 1000
    return metrics


def test_draft_lengths_are_a_histogram() -> None:
    assert spoken().draft_lengths == [1, 0, 2] and spoken().mean_draft_length == pytest.approx(4 / 3)
    tree = Metrics()
    tree.count_draft([0, 0, 1, 2, 2], [0, 1])
    assert tree.draft_lengths == [0, 0, 0, 0, 0, 1]
    both = total([spoken(), tree, spoken()])
    assert both.draft_lengths == [2, 0, 4, 0, 0, 1] and both.kv_bytes == 2000
    assert sum(spoken().draft_lengths) == spoken().rounds


def test_the_prediction_is_that_of_the_measured_costs() -> None:
    assert predicted_speedup(3.0, 4, 0.1, 1.1) == pytest.approx(2.0)
    metrics = spoken()
    # A plain step takes 0.08 s: c = (0.08 / 4) / 0.08, v = 0.1 / 0.08, τ = 2, γ = 4 / 3.
    c, v = metrics.draft_cost_ratio(0.08), metrics.step_seconds / 0.08
    assert (c, v) == pytest.approx((0.25, 1.25))
    # Half of the time went to the first two of the four drafted tokens.
    assert metrics.draft_step_ratio(0.08) == pytest.approx(0.25) and total([metrics] * 2).draft_step_ratio(
        0.04
    ) == pytest.approx(0.5)
    metrics.first_seconds = 0.06
    assert metrics.draft_step_ratio(0.08) == pytest.approx(0.125) and Metrics().draft_step_ratio(1.0) is None
    # Six tokens in 0.38 s of drafting and verifying, against 0.08 s each.
    assert predicted_speedup(2, 4 / 3, 0.25 if c is None else c, v) == pytest.approx(6 * 0.08 / 0.38)
    plain = Metrics(rounds=10, gained=10, target_seconds=0.8)
    assert plain.step_seconds == pytest.approx(0.08) and plain.draft_cost_ratio(0.08) is None
    assert Metrics().step_seconds is None


def test_percentiles_are_taken_over_the_requests() -> None:
    metrics = total([Metrics(arrivals=[[float(i), 10.0 + 2 * i]]) for i in range(1, 12)])
    assert metrics.inter_token_seconds() == pytest.approx({"p50": 16, "p90": 20, "p99": 20.9})
    assert metrics.first_token_seconds == pytest.approx(6) and metrics.latency_seconds == pytest.approx(22)
    assert Metrics(arrivals=[[]]).inter_token_seconds() == {"p50": None, "p90": None, "p99": None}


def test_a_summary_names_every_figure() -> None:
    found = dict(spoken().summary())
    assert found["α accepted / drafted"] == "0.750 (3 / 4)" and found["accepted by position"] == "1.00 0.50"
    assert found["γ drafted a round"] == "1.33 (rounds by γ: 0: 1, 2: 2)" and found["τ tokens a round"] == "2.00"
    assert found["first token"] == "500.0 ms" and found["between tokens"].startswith("p50 50.0 ms, p90 100.0 ms")
    assert found["draft and target time"] == "0.08 s and 0.30 s" and found["mean target width"] == "2.33"
    empty = dict(Metrics().summary())
    assert empty.keys() == found.keys() and empty["τ tokens a round"] == "-" and empty["first token"] == "-"


def paced(rates: list[float], drafts: int) -> Metrics:
    """Drafts twice as long after one that was accepted whole, as copies are; each rate is that of 20 drafts."""
    drawn, metrics, length = random.Random(3), Metrics(), 2
    for number in range(drafts):
        rate = rates[number // 20 % len(rates)]
        right = [drawn.random() < rate for _ in range(length)]
        accepted = right.index(False) if False in right else length
        metrics.count_draft([*range(length)], [*range(accepted)])
        length = min(2 * length, 8) if accepted == length else accepted + 1
    return metrics


def test_acceptance_by_position_is_that_of_drafts_of_one_length() -> None:
    alike = paced([0.7], 20_000)
    assert alike.per_token_acceptance == pytest.approx(0.7, abs=0.01)
    assert alike.accepted_by_position == pytest.approx([0.7**i for i in range(1, 9)], abs=0.02)
    # Where copies go well for stretches, long drafts are those of such stretches: of what was drafted more is right.
    stretches = paced([0.95, 0.3], 20_000)
    drafted = [hit / tried for hit, tried in zip(stretches.accepted_at, stretches.drafted_at, strict=True)]
    assert drafted[2] > drafted[1] > drafted[0] + 0.03
    found = stretches.accepted_by_position
    assert found == sorted(found, reverse=True) and found[0] == pytest.approx(drafted[0])


def test_what_a_text_ended_before_was_not_rejected() -> None:
    cut, missed, whole = Metrics(), Metrics(), Metrics()
    cut.count_draft([0, 1, 2], [0], judged=False)
    missed.count_draft([0, 1, 2], [0])
    whole.count_draft([0, 1], [0, 1])
    assert (cut.rejected_at, missed.rejected_at, whole.rejected_at) == ([], [0, 1], [])
    assert missed.accepted_by_position == [1.0, 0.0, 0.0] and missed.per_token_acceptance == 0.5
    assert total([whole, missed]).accepted_by_position == pytest.approx([1.0, 0.5, 0.0])
    assert total([whole, missed]).per_token_acceptance == pytest.approx(3 / 4)
    assert Metrics().per_token_acceptance is None and Metrics().accepted_by_position == []
