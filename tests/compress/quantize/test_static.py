"""Static input scales: what the kernels do with them, and that the search finds the best of those it tries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quantize import smoothquant
from runtime.formats import dequantize, int8
from runtime.formats.packed import PackedWeight
from runtime.kernels import reference


def rows_with_outliers(tokens: int = 200, channels: int = 32, seed: int = 0) -> Tensor:
    rows = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    rows[3, 5], rows[70, 9] = 60.0, -45.0
    return rows


def random_weight(outputs: int = 24, channels: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(outputs, channels, generator=torch.Generator().manual_seed(seed))


def brute_error(rows: Tensor, scale: float, weights: list[Tensor]) -> float:
    codes = torch.round(rows.double() / scale).clamp(-127, 127)
    return sum(float(((codes * scale - rows.double()) @ w.double().T).square().sum()) for w in weights)


@pytest.mark.parametrize("activation", ["int8-token", "int8-tensor"])
def test_rounding_is_what_the_kernels_do(activation: str) -> None:
    rows, weight = rows_with_outliers(), random_weight()
    packed = int8.pack(weight)
    scale = smoothquant.input_scale(rows.abs().max() / 4) if activation == "int8-tensor" else None
    scheme = int8.scheme(activation)  # type: ignore[arg-type]
    layer = reference.packed_linear(PackedWeight(scheme, packed.codes, packed.scale, input_scale=scale))
    seen = smoothquant.round_tokens(rows) if scale is None else smoothquant.round_tensor(rows, scale)
    torch.testing.assert_close(layer(rows), seen @ dequantize(packed).T, rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_the_last_code_is_the_range(bound: float) -> None:
    scale = smoothquant.input_scale(torch.tensor(bound))
    assert scale.shape == () and scale.dtype == torch.float32
    assert float(smoothquant.round_tensor(torch.tensor([bound]), scale)[0]) == pytest.approx(bound, rel=1e-6)
    assert float(smoothquant.round_tensor(torch.tensor([bound * 2]), scale)[0]) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("bound", [0.0, 1e-44])
def test_inputs_that_are_always_zero_have_a_scale(bound: float) -> None:
    assert float(smoothquant.input_scale(torch.tensor(bound))) == 1.0


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), -1.0])
def test_a_range_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        smoothquant.input_scale(torch.tensor(bound))


def test_a_token_of_zeros_stays_zeros() -> None:
    rows = rows_with_outliers()
    rows[1] = 0
    assert torch.equal(smoothquant.round_tokens(rows)[1], torch.zeros(32))


def test_the_search_finds_the_best_scale_by_brute_force() -> None:
    rows, weights = rows_with_outliers(), [random_weight(), random_weight(40, seed=2)]
    shrinks = [1.0, 0.8, 0.6, 0.4, 0.2]
    found = smoothquant.search_input_scale(rows, rows.abs().max(), weights, shrinks)
    tried = {s: brute_error(rows, float(smoothquant.input_scale(rows.abs().max())) * s, weights) for s in shrinks}
    best = min(tried, key=lambda shrink: tried[shrink])
    assert float(found) == pytest.approx(float(smoothquant.input_scale(rows.abs().max())) * best, rel=1e-6)


def test_clipping_pays_where_the_largest_inputs_do_not_matter() -> None:
    rows, weight = rows_with_outliers(), random_weight()
    weight[:, [5, 9]] *= 1e-3
    full = smoothquant.input_scale(rows.abs().max())
    found = smoothquant.search_input_scale(rows, rows.abs().max(), [weight])
    assert brute_error(rows, float(found), [weight]) < 0.25 * brute_error(rows, float(full), [weight])
    # Where they matter, they are not clipped away.
    weight[:, [5, 9]] *= 1e6
    assert float(smoothquant.search_input_scale(rows, rows.abs().max(), [weight])) > 0.9 * float(full)


def test_nan_and_no_rows_are_refused() -> None:
    rows, weight = rows_with_outliers(), random_weight()
    smoothquant.search_input_scale(rows, torch.tensor(60.0), [weight])
    for bad in (rows[:0], rows.masked_fill(rows == rows.max(), torch.nan)):
        with pytest.raises(ValueError, match="finite input rows"):
            smoothquant.search_input_scale(bad, torch.tensor(60.0), [weight])
