"""HQQ against a brute search of scale and zero, and what its norm means for outliers."""

import pytest
import torch
from torch import Tensor

from compress.quantize import hqq
from compress.quantize.grid import Grid, decode, encode, fit
from runtime.formats.tensors import round_scale, spread

BF16 = torch.bfloat16


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    """Heavy tails, rows of different size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator)
    return (values + 0.15 * values**3) * torch.logspace(-3, 1, n).unsqueeze(1)


def loss(w: Tensor, grid: Grid, scale: Tensor, zero: Tensor, norm: float) -> Tensor:
    """Σ |error|^norm by group, (N, G)."""
    lost = (decode(encode(w, scale, zero, grid), scale, zero, grid) - w).abs().double().pow(norm)
    return lost.view(len(w), scale.shape[1], -1).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("norm", [0.5, 0.7, 1.0])
def test_its_norm_is_lower_than_that_of_other_rules(norm: float, bits: int, symmetric: bool) -> None:
    w, grid = weight(32, 256), Grid(bits, 64, symmetric)
    found = loss(w, grid, *hqq.fit(w, grid, BF16, norm=norm), norm)
    plain = loss(w, grid, *fit(w, grid, BF16), norm)
    searched = loss(w, grid, *fit(w, grid, BF16, search=True), norm)
    assert (found <= searched * (1 + 1e-5)).all()
    assert found.sum() < 0.97 * plain.sum() and found.sum() < 0.995 * searched.sum()
    # And not for nothing: the squared error is what the other rule makes least.
    squared = loss(w, grid, *hqq.fit(w, grid, BF16, norm=norm), 2)
    assert squared.sum() > loss(w, grid, *fit(w, grid, BF16, search=True), 2).sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_near_is_much_better(symmetric: bool) -> None:
    w, grid, norm = weight(64, 128, seed=3), Grid(3, 128, symmetric), 0.7
    scale, zero = hqq.fit(w, grid, torch.float32, norm)
    found, least = loss(w, grid, scale, zero, norm), loss(w, grid, scale, zero, norm)
    for factor in torch.linspace(0.97, 1.03, 31):
        least = torch.minimum(least, loss(w, grid, scale * factor, zero, norm))
    start = loss(w, grid, *fit(w, grid, torch.float32, search=True), norm)
    assert found.sum() < 1.03 * least.sum() and found.sum() < 0.98 * start.sum()


def test_outliers_are_given_up_for_the_many() -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    w[:, 7] = 6.0
    grid = Grid(4, 64)
    many = torch.arange(64) != 7

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        return (decode(encode(w, scale, zero, grid), scale, zero, grid) - w)[:, many].norm()

    assert error(*hqq.fit(w, grid, BF16)) < 0.8 * error(*fit(w, grid, BF16))


def test_scales_and_zeros_are_as_they_are_stored() -> None:
    w, grid = weight(40, 96) + 0.01, Grid(3, 32, symmetric=False)
    scale, zero = hqq.fit(w, grid, BF16)
    assert torch.equal(scale, round_scale(scale, BF16)) and bool((scale > 0).all())
    assert torch.equal(zero, zero.round()) and grid.low <= float(zero.min()) and float(zero.max()) <= grid.high
    assert float(zero.abs().max()) > 0
    packed = hqq.quantize(w.bfloat16(), grid, BF16)
    expected = hqq.fit(w.bfloat16(), grid, BF16)
    assert torch.equal(packed.scale, expected[0])
    assert torch.equal(packed.codes, encode(w.bfloat16(), *expected, grid))
    assert (spread(packed.codes.float(), packed) - w).norm() < 0.3 * w.norm()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_and_constants_are_safe(symmetric: bool) -> None:
    w = torch.tensor([[0.0] * 8, [2.0] * 8, [-2.0] * 8, [0.0] * 7 + [1.0]])
    scale, zero = hqq.fit(w, Grid(4, 8, symmetric), BF16)
    assert torch.isfinite(scale).all() and torch.isfinite(zero).all()
    back = decode(encode(w, scale, zero, Grid(4, 8, symmetric)), scale, zero, Grid(4, 8, symmetric))
    assert (back - w).abs().max() < 0.01


def test_bad_input_is_refused() -> None:
    w = weight(4, 32)
    for norm in (0.0, 1.5):
        with pytest.raises(ValueError, match="norm"):
            hqq.fit(w, Grid(4, 16), BF16, norm=norm)
    w[1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        hqq.fit(w, Grid(4, 16), BF16)
