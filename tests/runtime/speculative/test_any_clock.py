"""Whatever times a machine shows, the choice of γ and of drafters changes no text, and nothing fails."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime import Model, Speculator, load
from runtime.engine import metrics
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.fallback import ChainedDrafter, ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from tests.conftest import write_medusa

Makes = Callable[[], Drafter]
PROMPTS = ["def f(x):", "import os", "a = 1\na = 1\na = 1\na =", "class Tree:\n    def", "x"]
MIXES = ["lookup+medusa", "lookup+model", "suffix+lookup+medusa", "lookup,model", "lookup,suffix+medusa", "medusa"]


@pytest.fixture(scope="module")
def target(tiny_packed: Callable[..., Path]) -> Model:
    return load(tiny_packed("int8"))


@pytest.fixture(scope="module")
def makes(
    target: Model, tiny_packed: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Makes]:
    heads = load_heads(write_medusa(target.path, tmp_path_factory.mktemp("heads") / "medusa", scale=0.02), target)
    draft = load(tiny_packed("int4"))
    return {
        "lookup": LookupDrafter,
        "suffix": SuffixDrafter,
        "medusa": lambda: MedusaDrafter(heads),
        "model": lambda: ModelDrafter(draft),
    }


def mixed(mix: str, makes: dict[str, Makes]) -> Drafter:
    """`a+b`: b is asked where a finds nothing; `a,b`: chosen by text."""
    among = [
        ChainedDrafter([makes[part]() for part in one.split("+")]) if "+" in one else makes[one]()
        for one in mix.split(",")
    ]
    return among[0] if len(among) == 1 else ChosenDrafter(among)


# A clock's seed, the mean of its steps' logarithms and how far they scatter, and the decimals that it counts. With the
# second a forward took no time at all; with the third a drafter was never timed alone.
CLOCKS = [(0, -8.0, 1.0, 7), (8, -7.0, 2.5, 5), (205, -6.0, 3.0, 3)]


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_no_times_change_a_text(
    mix: str,
    clock: tuple[int, float, float, int],
    target: Model,
    makes: dict[str, Makes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed, mean, scatter, decimals = clock
    sampling = [Sampling(temperature=temperature, seed=seed) for temperature in (0.0, 0.0, 0.8, 0.0, 0.7)]
    expected = Speculator(target).generate(PROMPTS, 50, sampling, stop=())
    rng, seconds = np.random.default_rng(seed), [0.0]

    def now(_: metrics.Clock) -> float:
        seconds[0] += round(float(rng.lognormal(mean, scatter)), decimals)
        return seconds[0]

    monkeypatch.setattr(metrics.Clock, "now", now)
    speculator = Speculator(target, mixed(mix, makes), max_batch=int(rng.integers(1, 6)))
    drafted = 0
    for _ in range(2):
        found = speculator.generate(PROMPTS, 50, sampling, stop=())
        assert [result.tokens for result in found] == [result.tokens for result in expected]
        drafted += metrics.total([result.metrics for result in found]).drafted
    assert drafted > 0
