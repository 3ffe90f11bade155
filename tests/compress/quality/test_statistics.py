import math

import numpy as np
import pytest

from compress.quality.statistics import divergence, token_statistics


def test_the_figures_are_llama_perplexitys_sums() -> None:
    """The sums of its source, one token after the other."""
    chooser = np.random.default_rng(1)
    count = 257
    original, kl = chooser.gamma(1.5, 1.7, count), chooser.gamma(0.4, 0.05, count)
    compressed = np.abs(original + chooser.normal(0.02, 0.1, count))
    agrees = chooser.random(count) < 0.9

    def mean_and_error(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / count
        return mean, math.sqrt((sum(v * v for v in values) / count - mean**2) / (count - 1))

    spread, found = divergence(kl), token_statistics(original, compressed, agrees)
    assert (spread.mean, spread.mean_error) == pytest.approx(mean_and_error([*kl]))
    in_order = sorted(kl)
    place = 0.999 * (count - 1)
    low = int(place)
    assert spread.p999 == pytest.approx(in_order[low] + (place - low) * (in_order[low + 1] - in_order[low]))
    assert (spread.median, spread.max) == (in_order[count // 2], in_order[-1])

    covariance = sum(a * b for a, b in zip(compressed, original, strict=True)) / count
    covariance = (covariance - compressed.mean() * original.mean()) / (count - 1)
    errors = [mean_and_error([*values])[1] for values in (compressed, original)]
    ratio = math.exp(compressed.mean() - original.mean())
    error = ratio * math.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * covariance)
    assert (found.perplexity_ratio.value, found.perplexity_ratio.error) == pytest.approx((ratio, error))

    squares = [(math.exp(-a) - math.exp(-b)) ** 2 for a, b in zip(compressed, original, strict=True)]
    mean, error = mean_and_error(squares)
    assert (found.delta_p_rms.value, found.delta_p_rms.error) == pytest.approx(
        (math.sqrt(mean), 0.5 / math.sqrt(mean) * error)
    )
    share = agrees.mean()
    assert (found.same_top.value, found.same_top.error) == pytest.approx(
        (share, math.sqrt(share * (1 - share) / (count - 1)))
    )


def test_equal_models_have_no_error() -> None:
    losses = np.random.default_rng(0).gamma(2, 1, 9)
    found = token_statistics(losses, losses, np.ones(9, bool))
    assert found.perplexity_ratio.value == 1 and found.perplexity_ratio.error == 0
    assert found.delta_p_rms.value == found.delta_p_rms.error == 0
