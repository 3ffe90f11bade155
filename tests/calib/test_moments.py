"""Streaming moments against the same computed at once in float64, however the tokens were split into batches."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from calib.moments import Moments, Wants
from calib.observers import OBSERVERS

EVERYTHING = Wants(hessian=True, norms=True, absmax=True, rows=50)


def inputs(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Rows that are correlated, of channels of very different size and with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator)
    sizes = torch.logspace(-2, 2, width)
    return (torch.randn(tokens, width, generator=generator) @ mix + 0.5) * sizes


def fed(x: Tensor, wants: Wants, sizes: list[int]) -> Moments:
    moments = Moments(x.shape[-1], wants)
    for part in x.split(sizes):
        moments.add(part)
    return moments


@pytest.mark.parametrize("width", [1, 7, 512, 1300])  # below, at and across the blocks of the product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_those_of_all_tokens_at_once(width: int, dtype: torch.dtype) -> None:
    x = inputs(700, width).to(dtype)
    moments = fed(x, EVERYTHING, [1, 400, 299])
    exact = x.double()
    hessian = moments.hessian
    expected = exact.T @ exact / 700
    scale = expected.diagonal().sqrt()
    # Relative to the channels' sizes, which differ by ten thousand: float32 sums of 700 products.
    assert ((hessian - expected) / scale / scale.unsqueeze(1)).abs().max() < 2e-6
    assert torch.equal(hessian, hessian.T)
    assert torch.allclose(moments.norms.double(), exact.norm(dim=0), rtol=1e-6)
    assert torch.equal(moments.absmax, x.float().abs().amax(dim=0))
    assert torch.allclose(moments.absmean.double(), exact.abs().mean(dim=0), rtol=1e-6)
    assert moments.tokens == 700


def test_more_rows_than_are_widened_at_once_and_leading_dimensions() -> None:
    x = inputs(9000, 24)
    whole, pieces = Moments(24, EVERYTHING), fed(x, EVERYTHING, [4096, 4096, 808])
    whole.add(x.view(9, 1000, 24))
    assert whole.tokens == 9000
    assert torch.equal(whole.hessian, pieces.hessian)
    assert torch.equal(whole.norms, pieces.norms)


def test_a_hessian_that_was_read_goes_on() -> None:
    x = inputs(600, 600)
    read, unread = Moments(600, Wants(hessian=True)), fed(x, Wants(hessian=True), [300, 300])
    read.add(x[:300])
    assert read.hessian is not None
    read.add(x[300:])
    assert torch.equal(read.hessian, unread.hessian)


def test_only_what_is_wanted_is_kept() -> None:
    moments = fed(inputs(10, 8), Wants(norms=True), [10])
    assert moments.norms.shape == (moments.inputs,)
    for name in ("hessian", "absmax", "absmean", "rows"):
        with pytest.raises(ValueError, match="not collected"):
            getattr(moments, name)
    both = Wants(norms=True, rows=3) | Wants(hessian=True, rows=2)
    assert both == Wants(hessian=True, norms=True, rows=3)


def test_kept_rows_do_not_depend_on_the_batches() -> None:
    x = inputs(1000, 5)
    first, second = fed(x, Wants(rows=64), [1000]), fed(x, Wants(rows=64), [3, 60, 500, 437])
    assert torch.equal(first.rows, second.rows)
    places = [int((x == row).all(dim=1).nonzero()) for row in first.rows]
    assert len(set(places)) == 64 and places == sorted(places)
    assert not torch.equal(first.rows, x[:64])
    few = fed(x[:40], Wants(rows=64), [30, 10])
    assert torch.equal(few.rows, x[:40])


def test_rows_are_drawn_evenly() -> None:
    """Each of 20 rows is kept 5 times in 20, over 1,200 seeds."""
    x = torch.arange(20.0).unsqueeze(1)
    counts = torch.zeros(20)
    for seed in range(1200):
        moments = Moments(1, Wants(rows=5), seed)
        for part in x.split([8, 12]):
            moments.add(part)
        counts[moments.rows.squeeze(1).long()] += 1
    assert chisquare(counts.numpy()).pvalue > 1e-3
    # The same test sees a draw that forgets the first batch.
    counts[:8] -= 60
    assert chisquare(counts.numpy()).pvalue < 1e-3


def test_scaled_is_what_divided_inputs_would_have_given() -> None:
    x, factor = inputs(500, 600), torch.linspace(0.1, 9, 600)
    scaled, divided = fed(x, EVERYTHING, [500]).scaled(factor), fed(x / factor, EVERYTHING, [500])
    for name in ("hessian", "norms", "absmax", "absmean", "rows"):
        found, expected = getattr(scaled, name), getattr(divided, name)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), name
    assert torch.equal(scaled.hessian, scaled.hessian.T)
    assert scaled.tokens == 500
    with pytest.raises(ValueError, match="positive"):
        divided.scaled(torch.zeros(600))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_is_refused_whole(bad: float) -> None:
    x = inputs(100, 8)
    moments = fed(x, EVERYTHING, [100])
    spoilt = x.clone()
    spoilt[77, 3] = bad
    with pytest.raises(ValueError, match="1 of 800 inputs"):
        moments.add(spoilt)
    assert moments.tokens == 100
    assert torch.equal(moments.hessian, fed(x, EVERYTHING, [100]).hessian)


def test_shapes_are_checked_and_nothing_is_nothing() -> None:
    moments = Moments(8, EVERYTHING)
    with pytest.raises(ValueError, match="8 inputs"):
        moments.add(torch.zeros(3, 9))
    moments.add(torch.zeros(0, 8))
    assert moments.tokens == 0
    assert float(moments.hessian.abs().max()) == float(moments.absmean.abs().max()) == 0
    with pytest.raises(ValueError, match="at least 1 input"):
        Moments(0, EVERYTHING)


def test_bytes_are_those_held() -> None:
    moments = fed(inputs(200, 16), EVERYTHING, [200])
    held = [value for value in vars(moments).values() if isinstance(value, Tensor)]
    assert moments.nbytes == sum(t.numel() * t.element_size() for t in held)
    assert Moments(16, EVERYTHING).nbytes == moments.nbytes


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_sees_every_batch(name: str) -> None:
    x = inputs(300, 16)
    moments, alone = Moments(16, Wants(observer=name)), OBSERVERS[name]()
    empty = Moments(16, Wants(observer=name)).nbytes
    for part in x.split([100, 1, 199]):
        moments.add(part)
        alone.add(part)
    assert moments.observed == alone.absmax() > 0
    assert moments.nbytes == empty
    assert (Wants(rows=3) | Wants(observer=name)).observer == name
    # A range of all values cannot be scaled with its channels.
    assert moments.scaled(torch.full((16,), 2.0)).observed is None
    assert fed(x, Wants(norms=True), [300]).observed is None
