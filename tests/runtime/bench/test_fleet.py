"""The capacity plan: what queueing theory says of simple fleets, routing, and the command's mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.bench.__main__ import app
from runtime.bench.fleet import Figures, Fleet, Load, simulate


def test_one_server_waits_as_theory_says() -> None:
    """M/D/1: a mean wait of ρ·s / 2(1 − ρ), Pollaczek and Khinchine."""
    figures, service = Figures(0.5, 0.001, ((1, 0.02),)), 0.1
    for share in (0.3, 0.6, 0.8):
        load = Load(share / service, 15_000, 100, 1)
        found = simulate(figures, Fleet(1, max_batch=1), load)
        wait = share * service / (2 * (1 - share))
        assert found.latency_ms["mean"] == pytest.approx(1e3 * (0.5 + service + wait), rel=0.06)
        assert found.latency_ms == found.ttft_ms and found.busy == pytest.approx(share, rel=0.03)


def test_rounds_cost_what_was_measured() -> None:
    figures = Figures(0.0, 0.001, ((1, 0.02), (4, 0.05), (8, 0.07)))
    assert figures.round(0, 3) == pytest.approx(0.003)
    assert [figures.round(count, 0) for count in (1, 2, 4, 6, 8)] == pytest.approx([0.02, 0.03, 0.05, 0.06, 0.07])
    assert figures.round(12, 10) == pytest.approx(0.01 + 0.07 + 4 * 0.005)
    assert Figures(0.0, 0.0, ((1, 0.02),)).round(9, 0) == 0.02
    alone = simulate(figures, Fleet(1), Load(0.01, 50, 600, 10))
    # A prompt of 600 in pieces of 512, whose last row gives a token; nine more in rounds of one text.
    assert alone.latency_ms["p50"] == pytest.approx(1e3 * (0.6 + 9 * 0.02))
    assert alone.ttft_ms["p50"] == pytest.approx(600)


def test_more_replicas_help_unless_they_share_a_core() -> None:
    figures, load = Figures(0.0, 0.0002, ((1, 0.01), (8, 0.02))), Load(8.0, 400, 512, 32)
    one, two = (simulate(figures, Fleet(count), load) for count in (1, 2))
    shared = simulate(figures, Fleet(2, at_once=1), load)
    assert two.latency_ms["p90"] < 0.9 * one.latency_ms["p90"]
    assert shared.latency_ms["p90"] > 1.2 * two.latency_ms["p90"]
    assert simulate(figures, Fleet(2), load) == two != simulate(figures, Fleet(2), Load(8.0, 400, 512, 32, seed=1))


def test_routing_by_prefix_reads_less_again() -> None:
    figures = Figures(0.0, 0.001, ((1, 0.01), (8, 0.02)))
    load = Load(2.0, 400, 1100, 8, shared=1024, prefixes=4)
    small = {"replicas": 2, "pages": 40}
    ours, rays = (simulate(figures, Fleet(**small, prefix=prefix), load) for prefix in (True, False))  # type: ignore[arg-type]
    assert ours.reuse > 0.9 > rays.reuse + 0.2
    assert ours.ttft_ms["p50"] < 0.6 * rays.ttft_ms["p50"]
    assert ours.imbalance < 1.5


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    figures = tmp_path / "one.json"
    told = {"overhead": 0.01, "prompt": 0.001, "rounds": [[1, 0.01], [4, 0.02]]}
    figures.write_text(json.dumps(told))
    words = ["fleet", "--figures", str(figures), "--requests", "20", "--json", str(tmp_path / "out.json")]
    found = CliRunner().invoke(app, [*words, "--price", "1.5"])
    assert found.exit_code == 0 and "per million" in found.output
    assert len(json.loads((tmp_path / "out.json").read_text())["result"]) == 9
    for wrong, sentence in (
        (["--rates", "0"], "--rates: expected numbers above 0"),
        (["--shared", "512"], "--shared: 512 of 512"),
        (["--replicas", "two"], "--replicas"),
        (["--measure", "http://127.0.0.1:9"], "no server answers there"),
    ):
        found = CliRunner().invoke(app, [*words, *wrong])
        assert found.exit_code == 2 and sentence in found.output
    for bad in ("{", json.dumps(told | {"rounds": []}), json.dumps(told | {"rounds": [[4, 1], [1, 1]]}), "[]"):
        figures.write_text(bad)
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 2 and "--figures" in found.output
