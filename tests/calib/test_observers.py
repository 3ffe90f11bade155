"""Ranges against brute force on the values themselves, which histograms only approximate to the width of a bin."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calib.observers import (
    OBSERVERS,
    Observer,
    entropy,
    histogram,
    largest,
    mean_squared_error,
    percentile,
)


def values(tokens: int = 3000, channel: int = 3, seed: int = 0) -> Tensor:
    """(tokens, 4) with a mean, heavy tails and a size that each channel number has of its own."""
    generator = torch.Generator().manual_seed(100 * channel + seed)
    x = torch.randn(tokens, 4, generator=generator) ** 3
    return (x + channel / 2 - 1) * 10 ** (channel / 2 - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_is_exact(dtype: torch.dtype) -> None:
    x = values(40).to(dtype)
    assert largest(x) == float(x.float().abs().max()) == histogram(x).highest
    assert largest(torch.zeros(3)) == 0


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("channel", range(4))
def test_percentile_leaves_out_what_it_may(share: float, channel: int) -> None:
    x = values(channel=channel)
    ordered = x.flatten().abs().sort().values
    spare = math.floor(len(ordered) * (1 - share) + 1e-9)
    width = float(ordered[-1]) / 2048
    assert percentile(histogram(x), share) == pytest.approx(float(ordered[-1 - spare]), abs=1.01 * width)


@pytest.mark.parametrize("limit", [1, 7, 127])
@pytest.mark.parametrize("channel", range(4))
def test_mean_squared_error_is_the_least_that_any_tried_range_has(limit: int, channel: int) -> None:
    x = values(2000, channel).double()

    def error(absmax: float) -> float:
        codes = (x / (absmax / limit)).round().clamp(-limit, limit)
        return float((codes * (absmax / limit) - x).square().sum())

    found = mean_squared_error(histogram(x.float()), limit)
    tried = [error(float(x.abs().max()) * i / 100) for i in range(1, 101)]
    assert error(found) <= 1.01 * min(tried)
    if limit < 127:  # heavy tails: with few codes the whole range is not the best one
        assert error(found) < 0.9 * tried[-1]


def brute_force_entropy(stream: np.ndarray, levels: int, bins: int) -> float:
    """Migacz's rule with loops, on the histogram of |x|."""
    half = bins
    span = float(np.abs(stream).max())
    counts = np.zeros(half)
    for value in np.abs(stream):
        place = min(math.floor(value / span * half), half - 1)
        counts[place] += 1
    best = (np.inf, 0)
    for kept in sorted({*range(half, levels - 1, -max(1, half // (2 * levels))), levels}, reverse=True):
        exact = counts[:kept].copy()
        exact[-1] += counts[kept:].sum()
        spread = np.zeros(kept)
        for level in range(levels):
            members = [i for i in range(kept) if i * levels // kept == level]
            filled = [i for i in members if counts[i] > 0]
            for i in filled:
                spread[i] = counts[members].sum() / len(filled)
        spread = np.maximum(spread / max(spread.sum(), 1), 0.5 / len(stream))
        exact /= len(stream)
        divergence = sum(p * np.log(p / q) for p, q in zip(exact, spread, strict=True) if p > 0)
        best = min(best, (divergence, -kept))
    return span * -best[1] / half


def test_entropy_is_the_textbooks() -> None:
    x = values(400)
    x[7, 1] = 9000.0
    found = entropy(histogram(x, bins=128), levels=8)
    assert found == pytest.approx(brute_force_entropy(x.numpy().ravel(), 8, 128), rel=1e-5)
    assert found < 1000  # an outlier is cut off, which min-max would not do
    with pytest.raises(ValueError, match="128 levels"):
        entropy(histogram(x, bins=64))


@pytest.mark.parametrize("rule", [percentile, mean_squared_error, entropy])
def test_batches_count_like_one(rule) -> None:
    x = values(2000)
    x[:300] *= 0.01  # the span has to grow
    observer = Observer(partial(histogram, bins=512), rule)
    counted = None
    for part in x.split([300, 1, 1699]):
        observer.add(part)
        counted = histogram(part, counted, 512)
    # Counted again from the values, at the span that the batches have led to.
    places = (x.flatten().abs() / counted.span * 512).long().clamp(max=511)
    expected = torch.bincount(places, minlength=512)
    # The first batch's highest value was in the last bin then, and is on the edge of the next one now.
    assert (counted.counts.cumsum(0) - expected.cumsum(0)).abs().max() <= 1
    assert counted.counts.sum() == x.numel() and counted.highest == largest(x)
    assert observer.absmax() == rule(counted)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=12), min_size=1, max_size=5),
    st.sampled_from([percentile, mean_squared_error, partial(mean_squared_error, limit=3), entropy]),
)
def test_every_range_lies_within_the_largest(batches, rule) -> None:
    observer, whole = Observer(partial(histogram, bins=512), rule), OBSERVERS["minmax"]()
    for batch in batches:
        observer.add(torch.tensor(batch))
        whole.add(torch.tensor(batch))
    assert 0 <= observer.absmax() <= whole.absmax() == max(abs(one) for batch in batches for one in batch)


def test_moving_average_follows_the_batches() -> None:
    observer = OBSERVERS["moving_average"]()
    parts = values(100).split(25)
    average = largest(parts[0])
    for number, part in enumerate(parts):
        observer.add(part)
        average = average if number == 0 else 0.9 * average + 0.1 * largest(part)
    assert observer.absmax() == pytest.approx(average)
    assert observer.absmax() != pytest.approx(largest(parts[-1]))


@pytest.mark.parametrize("name", OBSERVERS)
def test_zeros_have_an_empty_range_until_something_comes(name: str) -> None:
    observer = OBSERVERS[name]()
    observer.add(torch.zeros(200, 3))
    assert observer.absmax() == 0
    observer.add(torch.full((200, 3), 5.0))
    assert observer.absmax() == pytest.approx(0.5 if name == "moving_average" else 5, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", OBSERVERS)
def test_bad_values_are_refused_and_leave_no_trace(name: str, bad: float) -> None:
    x = values(50)
    spoilt = x.clone()
    spoilt[3, 1] = bad
    observer = OBSERVERS[name]()
    with pytest.raises(ValueError, match="has seen a batch"):
        observer.absmax()
    observer.add(x)
    before = observer.absmax()
    for batch, words in ((spoilt, "1 of 200"), (x[:0], "empty")):
        with pytest.raises(ValueError, match=words):
            observer.add(batch)
    assert observer.absmax() == before
    with pytest.raises(ValueError, match="share"):
        percentile(histogram(x), 0.0)
