"""SmoothQuant's factors and its search for α, against brute force, and below plain W8A8 where channels stand out."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quantize import smoothquant

DTYPE = torch.bfloat16
ACTIVATIONS: list[Literal["int8-token", "int8-tensor"]] = ["int8-token", "int8-tensor"]


def outlier_inputs(tokens: int = 300, channels: int = 64, seed: int = 0) -> Tensor:
    rows = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    rows[:, ::16] *= 60
    return rows


def random_weight(outputs: int = 48, channels: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(outputs, channels, generator=torch.Generator().manual_seed(seed)) * 0.1


def brute_error(rows: Tensor, weights: list[Tensor], factor: Tensor, activation: str) -> float:
    """Σ ‖X̂ Ŵᵀ − X Wᵀ‖² / ‖X Wᵀ‖² in float64, from the definition."""
    smooth = rows.double() / factor
    largest = smooth.abs().amax() if activation == "int8-tensor" else smooth.abs().amax(dim=1, keepdim=True)
    x = (smooth / (largest / 127)).round() * (largest / 127)
    total = 0.0
    for weight in weights:
        scaled = weight.double() * factor
        step = (scaled.abs().amax(dim=1, keepdim=True) / 127.5).to(DTYPE).double()
        w = (scaled / step).round().clamp(-127, 127) * step
        exact = rows.double() @ weight.double().T
        total += float((x @ w.T - exact).square().sum() / exact.square().sum())
    return total


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 1000))
def test_factors_are_the_papers(alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.rand(16, generator=generator) * 10 + 0.01 for _ in range(2))
    torch.testing.assert_close(smoothquant.factors(x, w, alpha), x**alpha / w ** (1 - alpha), rtol=1e-5, atol=0)


def test_at_a_half_both_sides_have_the_same_ranges() -> None:
    x, w = torch.tensor([100.0, 1.0, 4.0]), torch.tensor([0.01, 0.5, 4.0])
    factor = smoothquant.factors(x, w, 0.5)
    torch.testing.assert_close(x / factor, w * factor)


def test_a_dead_channel_keeps_the_factor_one() -> None:
    factor = smoothquant.factors(torch.tensor([0.0, 4.0, 4.0]), torch.tensor([1.0, 0.0, 1.0]), 0.5)
    assert factor.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        smoothquant.factors(torch.ones(3), torch.ones(3), alpha)


def test_nan_and_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        smoothquant.factors(torch.tensor([1.0, torch.nan]), torch.ones(2), 0.5)
    with pytest.raises(ValueError, match="range a channel"):
        smoothquant.factors(torch.ones(3), torch.ones(2), 0.5)
    rows = outlier_inputs()
    rows[4, 4] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        smoothquant.search_alpha([random_weight()], rows, torch.ones(64), "int8-token", DTYPE)


def test_weight_ranges_are_over_all_layers() -> None:
    weights = [torch.tensor([[1.0, -2.0], [0.5, 1.0]]), torch.tensor([[-3.0, 0.0]])]
    assert smoothquant.weight_absmax(weights).tolist() == [3.0, 2.0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_search_finds_the_best_alpha_by_brute_force(activation: Literal["int8-token", "int8-tensor"]) -> None:
    rows, weights = outlier_inputs(), [random_weight(), random_weight(32, seed=2)]
    absmax = rows.abs().amax(dim=0)
    found = smoothquant.search_alpha(weights, rows, absmax, activation, DTYPE)
    w = smoothquant.weight_absmax(weights)
    tried = {a: brute_error(rows, weights, smoothquant.factors(absmax, w, a), activation) for a in smoothquant.ALPHAS}
    least = brute_error(rows, weights, found, activation)
    assert least == pytest.approx(min(tried.values()), rel=1e-3)
    assert least < brute_error(rows, weights, torch.ones(64), activation)
    assert any(torch.equal(found, smoothquant.factors(absmax, w, a)) for a in smoothquant.ALPHAS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_smoothing_pays_on_outlier_channels(activation: Literal["int8-token", "int8-tensor"]) -> None:
    # Outliers only pass through small weights, as in language models.
    weight = random_weight()
    weight[:, ::16] *= 0.05
    rows = outlier_inputs()
    found = smoothquant.search_alpha([weight], rows, rows.abs().amax(dim=0), activation, DTYPE)
    fresh = outlier_inputs(seed=9)
    plain = brute_error(fresh, [weight], torch.ones(64), activation)
    assert brute_error(fresh, [weight], found, activation) < 0.1 * plain


def test_no_smoothing_where_it_would_only_hurt() -> None:
    # Inputs that int8 holds exactly, and weights that int8 holds exactly: any factor can only spoil both.
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(-127, 128, (80, 32), generator=generator).float()
    rows[:, 0] = 127
    weight = torch.randint(-127, 128, (16, 32), generator=generator).float()
    weight[:, 0] = 127.5
    found = smoothquant.search_alpha([weight], rows, rows.abs().amax(dim=0), "int8-token", DTYPE)
    assert torch.equal(found, torch.ones(32))


def test_tied_channels_get_one_factor() -> None:
    rows, weight = outlier_inputs(), random_weight()

    def tie(statistic: Tensor) -> Tensor:
        return statistic.view(2, 32).amax(dim=0).repeat(2)

    found = smoothquant.search_alpha([weight], rows, rows.abs().amax(dim=0), "int8-tensor", DTYPE, tie=tie)
    assert torch.equal(found[:32], found[32:])
    errors = [brute_error(rows, [weight], factor, "int8-tensor") for factor in (found, torch.ones(64))]
    assert errors[0] < errors[1]


def test_the_range_of_the_whole_text_counts_not_the_rows_own() -> None:
    """A value that only the rest of the text has still decides the static scale."""
    rows, weight = outlier_inputs(), random_weight()
    absmax = rows.abs().amax(dim=0)
    near = smoothquant.search_alpha([weight], rows, absmax, "int8-tensor", DTYPE)
    absmax[1] *= 500
    far = smoothquant.search_alpha([weight], rows, absmax, "int8-tensor", DTYPE)
    assert float((rows.abs().amax(dim=0) / far)[1]) < float((rows.abs().amax(dim=0) / near)[1])
