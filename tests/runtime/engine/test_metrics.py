"""Figures from counts: histograms, percentiles, predictions, and the table of them."""

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
