"""The simulation against a cluster on this machine: 1, 2 and 3 replicas at three rates each. Wants a quiet machine."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter

import pytest

pytest.importorskip("ray")

from runtime.bench.fleet import Fleet, Load, simulate
from runtime.bench.fleet_ask import ask, checked, shared_prompts
from runtime.bench.fleet_figures import Cost, Figures
from runtime.bench.fleet_measure import measure
from runtime.bench.fleet_together import Together, together, write_together
from runtime.serve.ray_config import ClusterConfig, Replicas
from tests.ray_cluster import Nodes, nodes

TOKENS, PROMPT, REQUESTS, BATCH = 48, 96, 60, 8
SHARES = (0.25, 0.4, 0.55)  # of what the replicas can do
# How near: of three replicas that share two cores, each other's cache and the client's core less can be foreseen.
NEAR, CROWDED = 0.15, 0.25
STEADY = 1.4  # how far the same load's median may lie apart between passes, for figures to mean anything
LEAST, MOST, AROUND = 3, 9, 2  # passes; streams around a load


@dataclass(frozen=True)
class Seen:
    """What a load took, in milliseconds by percentile, and what replicas write together right before and after it."""

    count: int
    share: float
    load: Load
    latency: dict[str, float]
    around: tuple[Together, Together]


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with nodes(3) as found:
        yield found


def _load(rate: float, requests: int, seed: int) -> Load:
    return Load(rate, requests, PROMPT, TOKENS, 64, 8, seed)


def _per_second(address: str, texts: int) -> float:
    """Texts a second where so many are always there: in waves."""
    began = perf_counter()
    for wave in range(3):
        ask(address, shared_prompts(_load(1.0, texts, 100 + wave)))
    return 3 * texts / (perf_counter() - began)


def _middle(passes: Sequence[Figures]) -> Figures:
    """The median of each figure, at the first one's pace: the machine's own changes from minute to minute."""
    [(_, alone), *_] = passes[0].rounds
    paced = [one.at_pace(alone / one.rounds[0][1]) for one in passes]

    def cost(costs: Sequence[Cost]) -> Cost:
        return Cost(*map(median, zip(*map(astuple, costs), strict=True)))

    return Figures(
        median(one.overhead for one in paced), median(one.prompt for one in paced),
        tuple((texts, median(dict(one.rounds)[texts] for one in paced)) for texts, _ in paced[0].rounds),
        cost([one.ingress for one in paced]), cost([one.others for one in paced]),
        median(one.early for one in paced), median(one.held for one in paced), median(one.background for one in paced),
    )  # fmt: skip


def _foreseen(one: Figures, cores: int, seen: Seen) -> dict[str, float]:
    """What the simulation says of a load: the mean of that with what was seen before it, and after it."""
    fleet = Fleet(seen.count, BATCH, 300, cores=cores)
    found = [simulate(together(one, fleet, each), fleet, seen.load).latency_ms for each in seen.around]
    return {name: mean(each[name] for each in found) for name in found[0]}


def _error(ratios: Sequence[float]) -> float:
    """The standard error of their median."""
    return float(1.25 * stdev(ratios) / len(ratios) ** 0.5)


@pytest.mark.slow
def test_the_simulation_is_near_what_a_cluster_does(three: Nodes, tmp_path: Path) -> None:
    """Figures and loads in turns; medians over the passes. The machine's own speed changes from minute to minute, and
    what two cores do at once does even more: streams before and after each load, short as it is, tell both. There are
    as many passes as it takes to know a number of replicas' medians, whatever they are, to a third of how near they
    have to be: on a quiet machine three."""
    from compress.model.source import default_pair

    cores = os.cpu_count() or 1
    figures, able = list[Figures](), dict[int, float]()
    seen = list[Seen]()  # and not simulated yet
    real, ratios = (defaultdict[tuple[int, float, str], list[float]](list) for _ in range(2))

    def near(count: int) -> float:
        return NEAR if count <= cores else CROWDED

    def run(count: int, turn: int) -> None:
        replicas = Replicas(least=count, most=count, cpus=0, resources={"engine": 1})
        told = ClusterConfig(
            target=str(default_pair()[0]), name="pair", port=three.port, threads=1, drafter="none", pages=300,
            max_batch=BATCH, replicas=replicas,
        )  # fmt: skip
        address = three.server(told, tmp_path / "log").address
        if count == 1 and turn < LEAST:
            figures.append(measure(address, (1, 2, 4, 8), PROMPT, TOKENS, shared=True))
        if count not in able:
            able[count] = _per_second(address, count * BATCH)
        before = write_together(address, count, cores, _load(1.0, 1, 0), AROUND)
        for share in SHARES:
            load = _load(share * able[count], REQUESTS, int(100 * share) + count)
            latency = checked(address, load)
            after = write_together(address, count, cores, _load(1.0, 1, 0), AROUND)
            seen.append(Seen(count, share, load, latency, (before, after)))
            before = after

    counts = [1, 2, 3]
    for turn in range(MOST):
        for count in counts:
            run(count, turn)
        if turn < LEAST - 1:
            continue
        one = _middle(figures)
        for each in seen:
            foreseen = _foreseen(one, cores, each)
            for name in ("p50", "p90"):
                real[each.count, each.share, name].append(each.latency[name])
                ratios[each.count, each.share, name].append(foreseen[name] / each.latency[name])
        seen.clear()
        counts = sorted({count for (count, _, _), of in ratios.items() if _error(of) > near(count) / 3})
        if not counts:
            break
    lines = [
        f"{count} at {share * able[count]:.1f}/s, {name}: measured {median(real[count, share, name]):.0f} ms, simulated"
        f" over measured {median(of):.3f}: {', '.join(f'{ratio:.2f}' for ratio in of)}"
        for (count, share, name), of in ratios.items()
    ]
    print("\n".join(lines))
    far = [key for key, of in ratios.items() if abs(median(of) - 1) > near(key[0])]
    if far and any(max(times) > STEADY * min(times) for (_, _, name), times in real.items() if name == "p50"):
        pytest.skip("the machine is not quiet: " + "; ".join(lines))
    assert not far, lines
