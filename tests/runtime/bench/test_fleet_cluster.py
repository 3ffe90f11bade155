"""The simulation against a cluster on this machine: 1, 2 and 3 replicas at three rates each. Wants a quiet machine."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

pytest.importorskip("ray")

from runtime.bench.fleet import Figures, Fleet, Load, simulate
from runtime.bench.fleet_measure import ask, checked, crowding, measure, shared_prompts
from runtime.serve.ray_config import ClusterConfig, Replicas
from tests.ray_cluster import Nodes, nodes

TOKENS, PROMPT, REQUESTS, BATCH = 48, 96, 80, 8
SHARES = (0.25, 0.4, 0.55)  # of what the replicas can do
NEAR = 0.15
STEADY = 1.4  # how far the same load's median may lie apart between passes, for figures to mean anything
PASSES = 5


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with nodes(3) as found:
        yield found


def _load(rate: float, requests: int, seed: int) -> Load:
    return Load(rate, requests, PROMPT, TOKENS, 64, 3, seed)


def _per_second(address: str, texts: int) -> float:
    """Texts a second where so many are always there: in waves."""
    began = perf_counter()
    for wave in range(3):
        ask(address, shared_prompts(_load(1.0, texts, 100 + wave)))
    return 3 * texts / (perf_counter() - began)


@pytest.mark.slow
def test_the_simulation_is_near_what_a_cluster_does(three: Nodes, tmp_path: Path) -> None:
    """Figures and loads in turns, five times: the machine's own speed changes. The median of each ratio counts."""
    from compress.model.source import default_pair

    cores = os.cpu_count() or 1
    able: dict[int, float] = {}
    real, ratios = (
        defaultdict[tuple[int, float, str], list[float]](list),
        defaultdict[tuple[int, float, str], list[float]](list),
    )
    for _ in range(PASSES):
        one = Figures(0.0, 0.0, ((1, 0.0),))
        for count in (1, 2, 3):
            replicas = Replicas(least=count, most=count, cpus=0, resources={"engine": 1})
            told = ClusterConfig(
                target=str(default_pair()[0]), name="pair", port=three.port, threads=1, drafter="none", pages=300,
                max_batch=BATCH, replicas=replicas,
            )  # fmt: skip
            address = three.server(told, tmp_path / "log").address
            if count == 1:
                one = figures = measure(address, (1, 2, 4, 8), TOKENS, shared=True)
            else:
                figures = replace(one, crowd=crowding(address, one, count, cores, TOKENS))
            if count not in able:
                able[count] = _per_second(address, count * BATCH)
            for share in SHARES:
                load = _load(share * able[count], REQUESTS, int(100 * share) + count)
                seen = checked(address, load)
                found = simulate(figures, Fleet(count, BATCH, 300, cores=cores), load).latency_ms
                for name in ("p50", "p90"):
                    real[count, share, name].append(seen[name])
                    ratios[count, share, name].append(found[name] / seen[name])
    lines = [
        f"{count} at {share * able[count]:.1f}/s, {name}: measured {median(real[count, share, name]):.0f} ms,"
        f" simulated over measured {', '.join(f'{ratio:.2f}' for ratio in ratios[count, share, name])}"
        for count, share, name in ratios
    ]
    print("\n".join(lines))
    near = all(abs(median(of) - 1) <= NEAR for of in ratios.values())
    if not near and any(max(seen) > STEADY * min(seen) for (_, _, name), seen in real.items() if name == "p50"):
        pytest.skip("the machine is not quiet: " + "; ".join(lines))
    assert near, lines
