"""The capacity plan: what queueing theory says of simple fleets, routing, and the command's mistakes."""

import json
import math
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.bench.__main__ import app
from runtime.bench.fleet import Fleet, Load, simulate
from runtime.bench.fleet_ask import ask
from runtime.bench.fleet_cores import Clock
from runtime.bench.fleet_figures import Cost, Figures
from runtime.bench.fleet_together import Stream, Together, together
from runtime.errors import UserError


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
    shared = simulate(figures, Fleet(2, cores=1), load)
    assert two.latency_ms["p90"] < 0.9 * one.latency_ms["p90"]
    assert shared.latency_ms["p90"] > 1.2 * two.latency_ms["p90"]
    assert simulate(figures, Fleet(2), load) == two != simulate(figures, Fleet(2), Load(8.0, 400, 512, 32, seed=1))


def test_threads_share_cores_by_how_many_have_work() -> None:
    """Processor sharing, by hand: three threads on two cores, the third of which begins when the first has ended."""
    clock, ends = Clock(2), dict[str, float]()
    for name, seconds in (("a", 2.0), ("b", 4.0), ("c", 6.0)):
        clock.work(name, seconds, lambda now, name=name: ends.setdefault(name, now))  # type: ignore[misc]
    clock.work("a", 1.0, lambda now: ends.setdefault("then", now))
    clock.run()
    # All three at 2/3 until 4.5, where a has done 3 and b 3; b and c at full speed from there.
    assert ends == pytest.approx({"a": 3.0, "then": 4.5, "b": 5.5, "c": 7.5})
    alone = Clock()
    for name in "abc":
        alone.work(name, 2.0, lambda now, name=name: ends.update({name: now}))  # type: ignore[misc]
    alone.run()
    assert [ends[name] for name in "abc"] == [2.0, 2.0, 2.0]


def test_who_runs_beside_threads_that_crowd_is_slower() -> None:
    """By hand: a and b crowd each other and c, which crowds nobody."""
    clock, ends = Clock(4, (1.0, 2.0)), dict[str, float]()
    for name, seconds, crowds in (("a", 2.0, True), ("b", 3.0, True), ("c", 4.0, False)):
        clock.work(name, seconds, lambda now, name=name: ends.setdefault(name, now), crowds=crowds)  # type: ignore[misc]
    clock.run()
    # All at 1/2 until a's end, where b has 1 left and c 2.
    assert ends == pytest.approx({"a": 4.0, "b": 5.0, "c": 6.0})
    apart = Clock(None, (1.0, 2.0))
    for name in "ab":
        apart.work(name, 2.0, lambda now, name=name: ends.update({name: now}), crowds=True)  # type: ignore[misc]
    apart.run()
    assert (ends["a"], ends["b"]) == (2.0, 2.0)


def test_replicas_on_one_machine_crowd_its_memory_and_requests_hold_texts_up() -> None:
    figures, load = Figures(0.0, 0.0002, ((1, 0.01), (8, 0.02))), Load(8.0, 400, 512, 32)
    alone, crowded = (
        simulate(replace(figures, crowd=crowd), Fleet(2, cores=4), load) for crowd in ((1.0,), (1.0, 1.5))
    )
    assert crowded.latency_ms["p90"] > 1.1 * alone.latency_ms["p90"]
    assert simulate(replace(figures, crowd=(1.0, 1.5)), Fleet(2), load) == simulate(figures, Fleet(2), load)
    held = simulate(replace(figures, held=0.02), Fleet(2, cores=4), load)
    assert held.latency_ms["p90"] > 1.1 * alone.latency_ms["p90"]
    # Who comes to an idle replica holds nobody up.
    rare = replace(load, rate=1e-4, requests=20)
    assert simulate(replace(figures, held=0.02), Fleet(1), rare) == simulate(figures, Fleet(1), rare)


def test_all_requests_and_news_go_through_one_ingress() -> None:
    """More replicas do not help where the ingress is full: M/D/1 again, its service that of a request and its news."""
    figures = Figures(0.0, 1e-6, ((1, 1e-4),), ingress=Cost(0.004, 0.001, 0.001))
    load = Load(100.0, 6_000, 20, 1)
    waits = [simulate(figures, Fleet(count), load).latency_ms["mean"] for count in (4, 8)]
    share, service = 100.0 * 0.006, 0.006
    # The two pieces of a text's work are served in turns with others', so the mean wait is near that of one piece.
    assert waits[0] == pytest.approx(waits[1], rel=0.05)
    assert waits[0] > 1e3 * (service + 0.5 * share * service / (2 * (1 - share)))
    free = simulate(Figures(0.0, 1e-6, ((1, 1e-4),)), Fleet(4), load).latency_ms["mean"]
    assert free < 1
    beside = Figures(0.0, 1e-6, ((1, 1e-4),), others=Cost(0.004, 0.001, 0.001))
    apart, shared = (simulate(beside, Fleet(4, cores=cores), load).latency_ms["mean"] for cores in (None, 1.0))
    assert apart < 1 and shared > 6
    # A cost that comes after the end delays the others alone.
    rare, late = Load(0.1, 50, 20, 1), replace(figures, early=0.0)
    assert simulate(late, Fleet(1), rare).latency_ms["p50"] < 0.4 * simulate(figures, Fleet(1), rare).latency_ms["p50"]
    assert simulate(late, Fleet(1), load).latency_ms["p50"] > 1.5 * simulate(late, Fleet(1), rare).latency_ms["p50"]


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
    for background, told_so in ((0.1, False), (1.8, True)):
        figures.write_text(json.dumps(told | {"background": background}))
        found = CliRunner().invoke(app, [*words, "--cores", "2"])
        assert found.exit_code == 0 and ("1.8 of 2 cores were busy" in found.output) == told_so
    for wrong, sentence in (
        (["--rates", "0"], "--rates: expected numbers above 0"),
        (["--shared", "512"], "--shared: 512 of 512"),
        (["--replicas", "two"], "--replicas"),
        (["--measure", "http://127.0.0.1:9"], "no server answers there"),
        (["--together", "http://127.0.0.1:9"], "--together: of how many cores"),
        (["--together", "http://127.0.0.1:9", "--cores", "2"], "no server answers there"),
    ):
        found = CliRunner().invoke(app, [*words, *wrong])
        assert found.exit_code == 2 and sentence in found.output
    for bad in (
        json.dumps(told | {"crowd": [0.0]}),
        json.dumps(told | {"held": -1}),
        "{",
        json.dumps(told | {"rounds": []}),
        json.dumps(told | {"rounds": [[4, 1], [1, 1]]}),
        "[]",
    ):
        figures.write_text(bad)
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 2 and "--figures" in found.output


def _written(figures: Figures, fleet: Fleet) -> Together:
    """What the simulation itself makes of texts in two streams, the first thinner."""

    def streams(rate: float) -> tuple[Stream, ...]:
        loads = [Load(rate, 24, 90, 96, 64, 8, seed) for seed in range(4)]
        return tuple(Stream(load, simulate(figures, fleet, load).latency_ms["mean"] / 1e3) for load in loads)

    return Together((0.004, 0.004), (0.005, 0.005), streams(1.2), streams(3.6))


@pytest.mark.parametrize(
    ("replicas", "pace", "crowd"),
    [
        (1, 0.6, 1.7),
        (2, 1.1, 0.9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 2.0, 1.3), (2, 2.0, 1.3), (2, 1.0, 1.0), (2, 0.6, 1.7), (3, 0.6, 1.7), (3, 2.0, 1.3))
        ),
    ],
)
def test_pace_and_crowd_are_found_again(replicas: int, pace: float, crowd: float) -> None:
    """In times that the simulation itself makes, though threads beside the engines make them longer, too."""
    ingress, others = Cost(0.001, 0.0002, 0.00005), Cost(0.002, 0.0005, 0.0001)
    figures = Figures(0.001, 0.0002, ((1, 0.004), (8, 0.01)), ingress, others, held=0.003, background=0.05)
    fleet = Fleet(replicas, cores=2)
    seen = _written(replace(figures.at_pace(pace), crowd=(1.0, crowd) if replicas > 1 else (1.0,)), fleet)
    found = together(figures, fleet, seen)
    assert found.rounds[1][1] == pytest.approx(pace * 0.01, rel=0.02)
    assert found.held == pytest.approx(pace * 0.003, rel=0.02)
    assert found.others.request == pytest.approx(pace * 0.002, rel=0.02)
    assert found.crowd == ((1.0,) if replicas == 1 else pytest.approx((1.0, crowd), rel=0.04))
    assert found.steady == pytest.approx(96 * 0.004)
    # Replicas with cores of their own would take less than these did.
    if replicas > 1 and crowd >= 1:
        dense = seen.dense[0]
        apart = simulate(figures.at_pace(pace), replace(fleet, cores=None), dense.load).latency_ms["mean"]
        assert 1e3 * dense.seconds > 1.1 * apart


def test_what_equal_texts_take_tells_how_much_times_waver() -> None:
    figures, generator = Figures(0.001, 0.0002, ((1, 0.004), (8, 0.01))), np.random.default_rng(5)
    seen = _written(figures, Fleet(2, cores=2))
    alone, at_once = (
        tuple((0.004 * np.exp(sigma * generator.standard_normal(2001))).tolist()) for sigma in (0.05, 0.3)
    )
    found = together(figures, Fleet(2, cores=2), replace(seen, alone=alone, at_once=at_once))
    assert found.waver == pytest.approx((0.05, 0.3), rel=0.1)


@pytest.mark.slow
def test_times_that_waver_spread_latencies() -> None:
    """What a text takes alone is log-normal where one time holds for all of it, and near the mean where many do."""
    figures, load = Figures(0.0, 1e-6, ((1, 0.025),), waver=(0.3,), steady=2.0), Load(0.1, 1000, 1, 21)
    spread = simulate(figures, Fleet(1), load).latency_ms
    assert spread["p50"] == pytest.approx(500, rel=0.03)
    assert spread["p90"] == pytest.approx(500 * math.exp(0.3 * 1.2816), rel=0.06)
    still = simulate(replace(figures, waver=(0.0,)), Fleet(1), load).latency_ms
    assert still["p90"] == pytest.approx(500, rel=1e-4) == still["p50"]
    long = simulate(replace(figures, steady=0.02), Fleet(1), load).latency_ms
    assert long["p90"] < 1.15 * long["p50"] and long["p50"] == pytest.approx(500, rel=0.05)
    # Where two run at once, the second value counts.
    both = replace(figures, waver=(0.0, 0.3))
    assert simulate(both, Fleet(1), load).latency_ms["p90"] == pytest.approx(500, rel=1e-4)
    busy = replace(load, rate=1.5)
    steady, wavering = (
        simulate(each, Fleet(2), busy).latency_ms["p90"] for each in (replace(both, waver=(0.0,)), both)
    )
    assert wavering > 1.05 * steady


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            b'HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n\r\n{"error": {"message": "no model is loaded"}}',
            "the server refused a request (503): no model is loaded",
        ),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n', "the server broke a stream off"),
    ],
)
def test_answers_without_usage_are_told_in_a_sentence(answer: bytes, sentence: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UserError, match=re.escape(sentence)):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}", [{"prompt": [5, 6], "max_tokens": 2}])
        thread.join()
