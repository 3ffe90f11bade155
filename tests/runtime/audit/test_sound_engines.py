"""How often the tests accuse a sound engine: texts drawn from the model itself, many times over."""

import numpy as np
import pytest

from runtime.audit.known import LETTERS
from runtime.audit.run import Plan, judged
from runtime.audit.sampled import CHUNK, PROMPTS, SETTINGS, Known, Samples, Setting

RUNS = 300


def simulated(known: Known, setting: Setting, count: int, length: int, rng: np.random.Generator) -> Samples:
    """`count` texts of each prompt, drawn from the target token by token, as `gather` would have them."""
    ways = (setting.temperature, setting.top_k, setting.top_p)
    rows, letters = count * len(PROMPTS), len(LETTERS)
    tokens, sure = np.zeros((rows, length), dtype=np.int64), np.zeros((rows, length), dtype=bool)
    probs, drafted = (np.zeros((rows, length, letters + 1)) for _ in range(2))
    ids = np.array([*known.target.letters, known.target.other])
    chunks = np.arange(rows) // CHUNK
    for number, text in enumerate(PROMPTS):
        own = np.flatnonzero(chunks % len(PROMPTS) == number)
        prompt = np.tile(known.target.encode(text), (len(own), 1))
        caches = [model.cache(len(own), prompt.shape[1] + length) for model in (known.target, known.draft)]
        inputs, start = prompt, 0
        for step in range(length):
            starts = np.full(len(own), start)
            both = [
                model.extend(cache, inputs, starts)[:, -1]
                for model, cache in zip((known.target, known.draft), caches, strict=True)
            ]
            p, sure[own, step] = known.target.probabilities(both[0], *ways)
            probs[own, step], drafted[own, step] = p, known.draft.probabilities(both[1], *ways)[0]
            upto = p.cumsum(axis=1)
            tokens[own, step] = (rng.random((len(own), 1)) * upto[:, -1:] >= upto).sum(axis=1)
            start += inputs.shape[1]
            inputs = ids[tokens[own, step]][:, None]
    return Samples(tokens, probs, sure, drafted, chunks, chunks % len(PROMPTS))


def accused(known: Known, run: int, count: int) -> list[str]:
    """The tests that a run fails."""
    rng = np.random.default_rng([run, 5])
    plan = Plan(seed=1000 * run)
    settings = (SETTINGS[run % 4], SETTINGS[(run + 1) % 4])
    rows = judged([(one, simulated(known, one, count, 16, rng), True) for one in settings], plan)
    return [f"{row.setting}: {one.test} {one.p}" for row in rows for one in row.accused]


def test_sound_samples_are_not_accused(known: Known) -> None:
    assert [accused(known, run, 64) for run in range(3)] == [[], [], []]


@pytest.mark.slow
def test_sound_engines_are_accused_in_less_than_one_of_a_hundred_runs(known: Known) -> None:
    found = [wrong for run in range(RUNS) if (wrong := accused(known, run, 96))]
    assert len(found) < RUNS / 100, found
