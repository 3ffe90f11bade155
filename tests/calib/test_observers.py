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
    Counted,
    Granularity,
    MinMax,
    MovingAverage,
    Observer,
    entropy,
    histogram,
    mean_squared_error,
    min_max,
    observe,
    percentile,
)


def values(tokens: int = 3000, width: int = 6, seed: int = 0) -> Tensor:
    """Channels of different sizes with means of either sign, and heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) ** 3
    return (x + torch.linspace(-1, 2, width)) * torch.logspace(-1, 1, width)


def streams(x: Tensor, granularity: Granularity) -> list[Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    return {"tensor": [rows.reshape(-1)], "channel": list(rows.T), "token": list(rows)}[granularity]


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_min_max_is_the_ends_with_zero_among_them(granularity: Granularity) -> None:
    x = values(40).view(4, 10, 6)
    x[..., 5] += 100  # never below 0
    found = min_max(x.bfloat16(), granularity)
    assert found.low.shape == {"tensor": (), "channel": (6,), "token": (4, 10)}[granularity]
    for stream, low, high in zip(
        streams(x.bfloat16().float(), granularity), found.low.reshape(-1), found.high.reshape(-1), strict=True
    ):
        assert float(low) == min(float(stream.min()), 0) and float(high) == max(float(stream.max()), 0)
    assert torch.equal(found.absmax, torch.maximum(found.low.abs(), found.high))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_percentile_leaves_out_what_it_may(granularity: Granularity, share: float) -> None:
    x = values()
    found = observe(x, partial(percentile, share=share), granularity)
    for stream, low, high in zip(
        streams(x, granularity), found.low.reshape(-1).tolist(), found.high.reshape(-1).tolist(), strict=True
    ):
        width = 2 * float(stream.abs().max()) / 2048
        spare = math.floor(len(stream) * (1 - share) / 2 + 1e-9)
        ordered = stream.sort().values
        assert low == pytest.approx(min(float(ordered[spare]), 0), abs=1.01 * width)
        assert high == pytest.approx(max(float(ordered[-1 - spare]), 0), abs=1.01 * width)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mean_squared_error_is_the_least_that_any_tried_range_has(bits: int, symmetric: bool) -> None:
    x = values(2000)

    def error(stream: Tensor, low: float, high: float) -> float:
        scale = max((high - low) / (2**bits - 1), 1e-30)
        least = -(2 ** (bits - 1)) if symmetric else round(low / scale)
        codes = (stream.double() / scale).round().clamp(least, least + 2**bits - 1)
        return float((codes * scale - stream).square().sum())

    found = observe(x, partial(mean_squared_error, bits=bits, symmetric=symmetric), "channel")
    narrower = 0
    for channel, stream in enumerate(x.T):
        whole = (min(float(stream.min()), 0), max(float(stream.max()), 0))
        ends = (float(found.low[channel]), float(found.high[channel]))
        if symmetric:
            whole, ends = ((-max(-low, high), max(-low, high)) for low, high in (whole, ends))
        tried = [error(stream, whole[0] * i / 100, whole[1] * i / 100) for i in range(1, 101)]
        assert error(stream, *ends) <= 1.01 * min(tried)
        narrower += error(stream, *ends) < 0.9 * tried[-1]
    assert narrower >= (3 if bits < 8 else 0)  # heavy tails: at few bits the whole range is not the best one


def brute_force_entropy(stream: np.ndarray, bits: int, bins: int) -> float:
    """Migacz's rule with loops, on the histogram of |x|."""
    half, levels = bins // 2, 2 ** (bits - 1)
    span = float(np.abs(stream).max())
    counts = np.zeros(half)
    for value in stream:
        place = min(math.floor(value / span * half), half - 1)
        counts[place if place >= 0 else -1 - place] += 1
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
    x = values(1500, 3)
    x[7, 1] = 900.0
    found = observe(x, partial(entropy, bits=4), "channel", bins=256)
    for channel, stream in enumerate(x.T):
        expected = brute_force_entropy(stream.numpy(), 4, 256)
        assert float(found.absmax[channel]) == pytest.approx(min(expected, float(stream.abs().max())), rel=1e-5)
    assert float(found.absmax[1]) < 100  # an outlier is cut off, which min-max would not do
    assert float(min_max(x, "channel").absmax[1]) == 900
    with pytest.raises(ValueError, match="256 bins"):
        observe(x, entropy, "tensor", bins=128)


@pytest.mark.parametrize("rule", [percentile, mean_squared_error, entropy])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_batches_count_like_one(rule, granularity) -> None:
    x = values(2000)
    x[:300] *= 0.01  # the span has to grow
    observer = Counted(rule, granularity, bins=512)
    for part in x.split([300, 1, 1699]):
        observer.add(part)
    found = observer.range()
    counted = histogram(x[:300], granularity, 512)
    for part in (x[300:301], x[301:]):
        counted = histogram(part, granularity, 512, counted)
    # Counted again from the values, at the span that the batches have led to.
    for row, stream in enumerate(streams(x, granularity)):
        places = (stream / counted.span[row] * 256).floor().long().add(256).clamp(0, 511)
        expected = torch.bincount(places, minlength=512)
        # The first batch's highest value was in the last bin then, and is on the edge of the next one now.
        assert (counted.counts[row].cumsum(0) - expected.cumsum(0)).abs().max() <= 1
    assert torch.equal(found.low.reshape(-1), rule(counted).low)
    assert found.high.shape == (() if granularity == "tensor" else (6,))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=12), min_size=1, max_size=5),
    st.sampled_from([percentile, mean_squared_error, partial(mean_squared_error, symmetric=False), entropy]),
)
def test_every_range_holds_zero_and_lies_within_the_ends(batches, rule) -> None:
    observer: Observer = Counted(rule, "tensor", bins=512)
    ends: Observer = MinMax("tensor")
    for batch in batches:
        observer.add(torch.tensor(batch))
        ends.add(torch.tensor(batch))
    found, whole = observer.range(), ends.range()
    assert whole.low <= found.low <= 0 <= found.high <= whole.high
    assert (float(whole.low), float(whole.high)) == (min(0, *map(min, batches)), max(0, *map(max, batches)))


def test_moving_average_follows_the_batches() -> None:
    observer = MovingAverage("channel", momentum=0.75)
    parts = values(100).split(25)
    low = high = None
    for part in parts:
        observer.add(part)
        ends = min_max(part, "channel")
        low = ends.low if low is None else 0.75 * low + 0.25 * ends.low
        high = ends.high if high is None else 0.75 * high + 0.25 * ends.high
    assert torch.allclose(observer.range().low, low)
    assert torch.allclose(observer.range().high, high)
    assert not torch.allclose(observer.range().high, min_max(parts[-1], "channel").high)


def test_each_token_is_its_own_range() -> None:
    x = values(20).view(4, 5, 6)
    found = observe(x, mean_squared_error, "token", bins=256)
    assert found.low.shape == (4, 5)
    alone = observe(x[2, 3], mean_squared_error, "tensor", bins=256)
    assert torch.equal(found.high[2, 3], alone.high)


def test_a_stream_of_zeros_has_an_empty_range() -> None:
    x = values(200)
    x[:, 2] = 0
    observer = Counted(mean_squared_error, "channel", bins=256)
    observer.add(x)
    assert float(observer.range().absmax[2]) == 0
    x[:, 2] = 5.0
    observer.add(x)
    assert float(observer.range().high[2]) == pytest.approx(5, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_bad_values_are_refused_and_leave_no_trace(bad: float) -> None:
    x = values(50)
    spoilt = x.clone()
    spoilt[3, 1] = bad
    for observer in (MinMax("channel"), MovingAverage("tensor"), Counted(percentile, "channel")):
        with pytest.raises(ValueError, match="has seen a batch"):
            observer.range()
        observer.add(x)
        before = observer.range()
        for batch, words in ((spoilt, "1 of 300"), (x[:0], "empty")):
            with pytest.raises(ValueError, match=words):
                observer.add(batch)
        assert torch.equal(observer.range().high, before.high)
    with pytest.raises(ValueError, match="streams"):
        histogram(x, "channel", before=histogram(x[:, :3], "channel"))
    with pytest.raises(ValueError, match="multiple of 4"):
        histogram(x, "tensor", bins=6)
    with pytest.raises(ValueError, match="share"):
        observe(x, partial(percentile, share=0.0), "tensor")
