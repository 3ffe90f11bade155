"""The simulation against a cluster on this machine: 1, 2 and 3 replicas at three rates each. Wants a quiet machine."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

pytest.importorskip("ray")

from runtime.bench.fleet import Cost, Figures, Fleet, Load, simulate
from runtime.bench.fleet_measure import ask, checked, crowding, measure, shared_prompts
from runtime.serve.ray_config import ClusterConfig, Replicas
from tests.ray_cluster import Nodes, nodes

TOKENS, PROMPT, REQUESTS, BATCH = 48, 96, 100, 8
SHARES = (0.25, 0.4, 0.55)  # of what the replicas can do
# How near: of three replicas that share two cores, each other's cache and the client's core less can be foreseen.
NEAR, CROWDED = 0.15, 0.25
STEADY = 1.4  # how far the same load's median may lie apart between passes, for figures to mean anything
PASSES = 3


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


def _pace(address: str) -> float:
    """Seconds between two tokens of a text alone: the machine's speed, as it is now."""
    gaps = []
    for seed in range(9):
        [text] = ask(address, shared_prompts(_load(1.0, 1, seed)))
        gaps.append((text.last - text.first) / (text.tokens - 1))
    return median(gaps)


def _at_pace(figures: Figures, times: float) -> Figures:
    """The figures of a machine that takes so many times as long for everything."""
    ingress, others = (Cost(*(times * one for one in astuple(cost))) for cost in (figures.ingress, figures.others))
    return replace(
        figures, overhead=times * figures.overhead, prompt=times * figures.prompt, held=times * figures.held,
        rounds=tuple((texts, times * seconds) for texts, seconds in figures.rounds), ingress=ingress, others=others,
    )  # fmt: skip


@pytest.mark.slow
def test_the_simulation_is_near_what_a_cluster_does(three: Nodes, tmp_path: Path) -> None:
    """Figures and loads in turns. The machine's own speed changes from minute to minute: figures count at the pace that
    it has around each load, by a text alone, and the median of each ratio over the passes."""
    from compress.model.source import default_pair

    cores = os.cpu_count() or 1
    able: dict[int, float] = {}
    real, ratios = (
        defaultdict[tuple[int, float, str], list[float]](list),
        defaultdict[tuple[int, float, str], list[float]](list),
    )
    for _ in range(PASSES):
        one, usual = Figures(0.0, 0.0, ((1, 0.0),)), 1.0
        for count in (1, 2, 3):
            replicas = Replicas(least=count, most=count, cpus=0, resources={"engine": 1})
            told = ClusterConfig(
                target=str(default_pair()[0]), name="pair", port=three.port, threads=1, drafter="none", pages=300,
                max_batch=BATCH, replicas=replicas,
            )  # fmt: skip
            address = three.server(told, tmp_path / "log").address
            if count == 1:
                before = _pace(address)
                one = figures = measure(address, (1, 2, 4, 8), TOKENS, shared=True)
                usual = (before + _pace(address)) / 2
            else:
                figures = replace(one, crowd=crowding(address, one, count, cores, TOKENS))
            if count not in able:
                able[count] = _per_second(address, count * BATCH)
            for share in SHARES:
                load = _load(share * able[count], REQUESTS, int(100 * share) + count)
                before = _pace(address)
                seen = checked(address, load)
                paced = _at_pace(figures, (before + _pace(address)) / 2 / usual)
                found = simulate(paced, Fleet(count, BATCH, 300, cores=cores), load).latency_ms
                for name in ("p50", "p90"):
                    real[count, share, name].append(seen[name])
                    ratios[count, share, name].append(found[name] / seen[name])
    lines = [
        f"{count} at {share * able[count]:.1f}/s, {name}: measured {median(real[count, share, name]):.0f} ms,"
        f" simulated over measured {', '.join(f'{ratio:.2f}' for ratio in ratios[count, share, name])}"
        for count, share, name in ratios
    ]
    print("\n".join(lines))
    near = all(abs(median(of) - 1) <= (NEAR if count <= cores else CROWDED) for (count, _, _), of in ratios.items())
    if not near and any(max(seen) > STEADY * min(seen) for (_, _, name), seen in real.items() if name == "p50"):
        pytest.skip("the machine is not quiet: " + "; ".join(lines))
    assert near, lines
