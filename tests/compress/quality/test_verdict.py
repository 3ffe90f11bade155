"""Verdicts are right as often as they say: losses are planted, and counted when they are called."""

import math

import numpy as np
import pytest

from compress.quality import mcnemar
from compress.quality.figures import Flips, Verdict
from compress.quality.intervals import LEVEL, POWER, student
from compress.quality.paired import paired
from compress.quality.verdict import CHOICES_MARGIN, MARGIN, judge

WINDOWS, DOCUMENTS, TOKENS, PAIRS = 40, 16, 40 * 511, 2000
NAMES = np.random.default_rng(8).permutation(np.arange(WINDOWS) % DOCUMENTS)


def losses(chooser: np.random.Generator, change: float, error: float, windows: int = WINDOWS) -> np.ndarray:
    """Differences of windows whose mean has about this error: documents have effects of their own, as large as all that
    windows add to them, and windows are skewed as losses are."""
    names = np.arange(windows) % DOCUMENTS if windows != WINDOWS else NAMES
    count = len(np.unique(names))
    documents = chooser.normal(0, 1, count)[names] * math.sqrt(count / 2)
    alone = (chooser.gamma(4, 1, windows) - 4) / 2 * math.sqrt(windows / 2)
    return math.log1p(change) + error * (documents + alone)


def flipped(chooser: np.random.Generator, loss: float, discordant: float, pairs: int = PAIRS) -> Flips:
    lost, won, _ = map(
        int, chooser.multinomial(pairs, [(discordant + loss) / 2, (discordant - loss) / 2, 1 - discordant])
    )
    return Flips(
        choices=pairs,
        options=4,
        original=0.5,
        compressed=0.5 - (lost - won) / pairs,
        lost=lost,
        won=won,
        changed=lost + won,
        p_value=mcnemar.p_value(lost, won),
        ci95=mcnemar.interval(lost, won, pairs, 1.96),
        smallest_loss=0.0,
        power=POWER,
    )


def calls(change: float, error: float, loss: float, discordant: float, times: int, seed: int) -> list[Verdict]:
    chooser = np.random.default_rng(seed)
    return [
        judge(paired(losses(chooser, change, error), NAMES, TOKENS), flipped(chooser, loss, discordant))
        for _ in range(times)
    ]


def share(found: list[Verdict], call: str) -> float:
    return sum(one.call == call for one in found) / len(found)


def error_for(change: float) -> float:
    """The error with which a growth by `change` is found at the power."""
    return math.log1p(change) / (student(1 - LEVEL / 2, DOCUMENTS - 1) + student(POWER, DOCUMENTS - 1))


def planted(change: float, times: int, seed: int) -> None:
    # Flips that say nothing: as many either way, and few.
    found = calls(change, error_for(change), 0.0, 0.001, times, seed)
    deviation = math.sqrt(POWER * (1 - POWER) / times)
    assert share(found, "worse") == pytest.approx(POWER, abs=3 * deviation + 0.03)
    assert np.median([one.smallest_change for one in found]) == pytest.approx(change, rel=0.15)


def test_a_planted_loss_is_called_at_the_power_and_equal_models_are_not() -> None:
    planted(0.01, 60, 1)
    assert share(calls(0.0, error_for(0.01), 0.0, 0.02, 60, 2), "worse") <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("points", [0.5, 1, 2])
def test_planted_growth_of_perplexity_is_called_at_the_stated_power(points: float) -> None:
    planted(points / 100, 200, int(10 * points))


@pytest.mark.slow
@pytest.mark.parametrize("points", [0.5, 1, 2])
def test_planted_loss_of_choices_is_called_at_the_stated_power(points: float) -> None:
    loss = points / 100
    discordant = min(
        (float(one) for one in np.geomspace(1.02 * loss, 8 * loss, 60)),
        key=lambda one: abs(mcnemar.power(PAIRS, one, loss, LEVEL) - POWER),
    )
    assert mcnemar.smallest_loss(PAIRS, discordant, LEVEL, POWER) == pytest.approx(loss, abs=1.5 / PAIRS)
    found = calls(0.0, error_for(0.1), loss, float(discordant), 200, int(100 * points))
    by_choices = sum("choices" in one.by and one.call == "worse" for one in found) / 200
    assert by_choices == pytest.approx(POWER, abs=3 * math.sqrt(POWER * (1 - POWER) / 200) + 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("points", [0.5, 1, 2])
def test_equal_models_are_called_worse_at_most_as_often_as_the_level_says(points: float) -> None:
    found = calls(0.0, error_for(points / 100), 0.0, 0.03, 1000, int(7 * points))
    assert share(found, "worse") <= LEVEL and share(found, "better") <= LEVEL


@pytest.mark.slow
def test_equal_models_are_called_the_same_with_the_tokens_that_were_asked_for() -> None:
    chooser = np.random.default_rng(4)
    unsure = judge(paired(exact(0.0, 0.008), np.arange(40), TOKENS), None)
    assert unsure.call == "cannot tell" and unsure.needs_tokens is not None
    same = 0
    for _ in range(200):
        # Four hundred blocks: as many as the tokens of 40 of them ask for, and more precise by that.
        factor = math.sqrt(unsure.needs_tokens / TOKENS)
        noise = (chooser.gamma(4, 1, 400) - 4) / 2 * math.sqrt(400)
        error = 0.008 / factor
        same += judge(paired(error * noise, np.arange(400), unsure.needs_tokens), None).call == "same"
    assert same / 200 >= POWER - 0.09


def exact(mean: float, error: float) -> np.ndarray:
    """Forty differences with just this mean and error."""
    values = np.random.default_rng(3).normal(0, 1, 40)
    values = (values - values.mean()) / values.std()
    return mean + values * error * math.sqrt(39)


@pytest.mark.parametrize(
    "mean, error, call, within",
    [
        (0.02, 0.002, "worse", False),
        (0.004, 0.001, "worse", True),
        (-0.02, 0.002, "better", False),
        (0.001, 0.002, "same", True),
        (0.001, 0.02, "cannot tell", False),
    ],
)
def test_calls_of_losses_alone(mean: float, error: float, call: str, within: bool) -> None:
    found = judge(paired(exact(mean, error), np.arange(40), 20_000), None)
    assert (found.call, found.within_margin) == (call, within)
    assert found.by == ["losses"] and found.needs_choices is None
    assert found.ci95[0] < found.change < found.ci95[1]
    assert (found.needs_tokens is not None) == (call == "cannot tell")
    if found.needs_tokens:
        expected = 20_000 * (2.926 * error / math.log1p(MARGIN)) ** 2
        assert expected < found.needs_tokens <= 1.1 * expected


def test_choices_may_contradict_or_leave_it_open() -> None:
    chooser = np.random.default_rng(0)
    close = paired(exact(0.0, 0.001), np.arange(40), 20_000)
    assert judge(close, flipped(chooser, 0.0, 0.01)).call == "same"
    assert judge(close, flipped(chooser, 0.05, 0.05)).by == ["choices"]
    few = judge(close, flipped(chooser, 0.0, 0.2, pairs=200))
    assert few.call == "cannot tell" and few.needs_tokens is None
    assert few.needs_choices is not None and few.needs_choices > 0.1 * (2.9 / CHOICES_MARGIN) ** 2
    # A gain in losses does not outweigh a loss of choices.
    gained = paired(exact(-0.02, 0.001), np.arange(40), 20_000)
    assert judge(gained, None).call == "better"
    assert judge(gained, flipped(chooser, 0.05, 0.05)).call == "worse"


def test_equal_losses_are_the_same() -> None:
    found = judge(paired(np.zeros(5), np.arange(5), 100), None)
    assert found.call == "same" and found.change == 0 and found.smallest_change == 0


def test_documents_are_the_blocks_where_there_are_enough_of_them() -> None:
    chooser = np.random.default_rng(6)
    names = np.arange(60) % 12
    shared = chooser.normal(0, 1, 12)[names] + chooser.normal(0, 0.01, 60)
    by_document, by_window = paired(shared, names, 600), paired(shared, np.zeros(0, np.int64), 600)
    assert (by_document.blocks, by_document.unit, by_window.blocks, by_window.unit) == (12, "document", 60, "window")
    # What windows share is counted once.
    assert by_document.error == pytest.approx(by_window.error * math.sqrt(5), rel=0.05)
    assert paired(shared, np.arange(60) % 3, 600).unit == "window"
    with pytest.raises(ValueError, match="at least 2 windows"):
        paired(shared[:1], names[:1], 10)
