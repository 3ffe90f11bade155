import numpy as np
import pytest
from scipy.stats import binom, binomtest
from scipy.stats import t as student_t

from compress.quality import mcnemar
from compress.quality.intervals import student


@pytest.mark.parametrize("lost, won", [(3, 10), (0, 0), (0, 7), (5, 5), (41, 20), (900, 1000)])
def test_the_exact_test_is_scipys(lost: int, won: int) -> None:
    expected = binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0
    assert mcnemar.p_value(lost, won) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 18, 31, 200])
@pytest.mark.parametrize("probability", [0.2, 0.8, 0.975])
def test_students_quantiles_are_scipys(probability: float, freedom: int) -> None:
    assert student(probability, freedom) == pytest.approx(student_t.ppf(probability, freedom), rel=1e-9)


def test_the_power_is_how_often_a_loss_is_found() -> None:
    pairs, discordant, loss = 700, 0.06, 0.024
    chooser = np.random.default_rng(5)
    shares = [(discordant + loss) / 2, (discordant - loss) / 2, 1 - discordant]
    drawn = chooser.multinomial(pairs, shares, size=2000)
    found = np.mean([mcnemar.p_value(int(lost), int(won)) <= 0.05 and lost > won for lost, won, _ in drawn])
    assert mcnemar.power(pairs, discordant, loss, 0.05) == pytest.approx(found, abs=0.03)
    # Where all flips are losses, only their number is left to chance.
    least = next(count for count in range(1, 20) if binomtest(0, count, 0.5).pvalue <= 0.05)
    assert mcnemar.power(pairs, 0.01, 0.01, 0.05) == pytest.approx(binom.sf(least - 1, pairs, 0.01), rel=1e-6)


def test_the_smallest_loss_has_the_power_and_a_smaller_one_has_not() -> None:
    for pairs, discordant in ((2000, 0.021), (2000, 0.1), (333, 0.0)):
        loss = mcnemar.smallest_loss(pairs, discordant, 0.05, 0.8)
        less = loss - 1 / pairs
        assert mcnemar.power(pairs, max(loss, discordant), loss, 0.05) >= 0.8
        assert mcnemar.power(pairs, max(less, discordant), less, 0.05) < 0.8
    assert mcnemar.smallest_loss(5, 0.2, 0.05, 0.8) == 1.0
    assert mcnemar.smallest_loss(2000, 0.02, 0.05, 0.8) < mcnemar.smallest_loss(500, 0.02, 0.05, 0.8)


def test_the_interval_covers_and_contains_the_estimate() -> None:
    low, high = mcnemar.interval(30, 12, 2000, 1.96)
    assert low < -18 / 2000 < high < 0
    drawn = np.random.default_rng(2).multinomial(800, [0.03, 0.02, 0.95], size=2000)
    bounds = [mcnemar.interval(int(lost), int(won), 800, 1.96) for lost, won, _ in drawn]
    assert np.mean([low <= -0.01 <= high for low, high in bounds]) == pytest.approx(0.95, abs=0.02)
