"""The simulation against a cluster on this machine: 1, 2 and 3 replicas at three rates each. Wants a quiet machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest

pytest.importorskip("ray")

from runtime.bench.fleet import Figures, Fleet, Load, simulate
from runtime.bench.fleet_measure import ask, checked, measure, shared_prompts
from runtime.serve.ray_config import ClusterConfig, Replicas
from tests.ray_cluster import Nodes, nodes

TOKENS, PROMPT, REQUESTS, BATCH = 48, 96, 60, 8
SHARES = (0.3, 0.5, 0.7)  # of what the replicas can do
NEAR = 0.15
STEADY = 0.1  # how far the same work's speed may lie apart, before and after, for figures to mean anything


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with nodes(3) as found:
        yield found


def _per_second(address: str, texts: int) -> float:
    """Texts a second where so many are always there: in waves."""
    began = perf_counter()
    for wave in range(3):
        ask(address, shared_prompts(Load(1.0, texts, PROMPT, TOKENS, 64, 3, 100 + wave)))
    return 3 * texts / (perf_counter() - began)


@pytest.mark.slow
def test_the_simulation_is_near_what_a_cluster_does(three: Nodes, tmp_path: Path) -> None:
    from compress.model.source import default_pair

    figures, lines, worst = Figures(0.0, 0.0, ((1, 0.0),)), [], 0.0
    for count in (1, 2, 3):
        replicas = Replicas(least=count, most=count, cpus=0, resources={"engine": 1})
        told = ClusterConfig(
            target=str(default_pair()[0]), name="pair", port=three.port, threads=1, drafter="none", pages=300,
            max_batch=BATCH, replicas=replicas,
        )  # fmt: skip
        server = three.server(told, tmp_path / "log")
        if count == 1:
            figures = measure(server.address, (1, 2, 4, 8), TOKENS, shared=True)
            lines.append(str(figures))
        able = _per_second(server.address, count * BATCH)
        for share in SHARES:
            rate, seed = share * able, int(100 * share)
            load = Load(rate, REQUESTS, PROMPT, TOKENS, 64, 3, seed)
            real = checked(server.address, load)
            fleet = Fleet(count, BATCH, 300, cores=os.cpu_count())
            found = simulate(figures, fleet, load).latency_ms
            for name in ("p50", "p90"):
                worst = max(worst, abs(found[name] / real[name] - 1))
                lines.append(
                    f"{count} at {rate:.1f}/s, {name}: simulated {found[name]:.0f}, measured {real[name]:.0f} ms"
                )
        again = _per_second(server.address, count * BATCH)
        if abs(again / able - 1) > STEADY:
            pytest.skip(f"the machine is not quiet: {able:.1f} and {again:.1f} texts a second; {'; '.join(lines)}")
    print("\n".join(lines))
    assert worst <= NEAR, lines
