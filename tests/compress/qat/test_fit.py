"""Codes fitted to a layer's inputs, against brute force in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.qat.fit import fit
from compress.qat.start import tables
from compress.quantize.gptq import factorize
from runtime.formats import three_of_four


def moments(inputs: int, seed: int) -> Tensor:
    """Second moments (K, K) of inputs that are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(4 * inputs, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    rows = mixed * torch.rand(inputs, generator=generator).add(0.1)
    return rows.T @ rows / len(rows)


def damped(hessian: Tensor) -> Tensor:
    """float64, with the ridge that `fit` adds."""
    exact = hessian.double()
    exact.diagonal().add_(factorize(hessian, None, 0.01)[2])
    return exact


def loss(weight: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """(N,) float64: e H eᵀ of each output."""
    error = weight.double() - rounded.double()
    return ((error @ hessian) * error).sum(1)


def patterns(codes: str, inputs: int) -> list[list[int]]:
    """What the inputs of one group may be, spelled out: of three of four, by hand."""
    if codes == "ternary":
        return [[-1], [0], [1]]
    every = [list(p) for p in itertools.product((-1, 0, 1), repeat=inputs)]
    return [p for p in every if p.count(0) == (inputs == 4)]


@pytest.mark.parametrize("inputs", [4, 3, 2, 1])
@given(seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_one_group_of_four_gets_the_best_of_all_patterns(inputs: int, seed: int) -> None:
    weight = torch.randn(6, inputs, generator=torch.Generator().manual_seed(seed))
    hessian = moments(inputs, seed)
    # More passes than it takes: scales and codes stand still then.
    found = fit(weight, hessian, three_of_four.table(), per_row=True, passes=8)
    tried = torch.tensor(patterns("ternary-1.25", inputs))
    losses = torch.stack([loss(weight, pattern * found.scale, damped(hessian)) for pattern in tried])
    assert torch.allclose(loss(weight, found.codes * found.scale, damped(hessian)), losses.amin(0), rtol=1e-4)
    assert torch.equal(found.codes.long(), tried[losses.argmin(0)])


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
@given(inputs=st.integers(1, 150), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_no_single_group_and_no_scale_would_do_better(codes: str, inputs: int, seed: int) -> None:
    weight, hessian = torch.randn(3, inputs, generator=torch.Generator().manual_seed(seed)), moments(inputs, seed)
    table, per_row = tables(codes)  # type: ignore[arg-type]
    found = fit(weight, hessian, table, per_row=per_row, passes=20)
    exact = damped(hessian)
    reached = loss(weight, found.codes * found.scale, exact)
    width = table.shape[1]
    for first in range(0, inputs, width):
        here = slice(first, min(first + width, inputs))
        for pattern in patterns(codes, here.stop - here.start):
            other = found.codes.clone()
            other[:, here] = torch.tensor(pattern, dtype=torch.int8)
            assert bool((loss(weight, other * found.scale, exact) >= reached * (1 - 1e-4)).all())
    for factor in (0.99, 1.01):
        changed = loss(weight, found.codes * found.scale * factor, exact)
        assert float(changed.sum()) >= float(reached.sum()) * (1 - 1e-6)
        assert not per_row or bool((changed >= reached * (1 - 1e-6)).all())


def test_wanted_is_where_each_weight_had_best_been() -> None:
    weight, hessian = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)), moments(8, 5)
    found, exact = fit(weight, hessian, three_of_four.table(), per_row=True), damped(hessian)
    rounded = (found.codes * found.scale).double()
    for column in range(8):
        error = weight.double() - rounded
        error[:, column] = 0
        # The least of a quadratic in one weight, the errors of the others as they are.
        best = weight[:, column].double() + (error @ exact[:, column]) / exact[column, column]
        assert torch.allclose(found.wanted[:, column].double(), best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_fitted_codes_lose_less_than_nearest_ones(codes: str) -> None:
    weight, hessian = torch.randn(32, 150, generator=torch.Generator().manual_seed(3)), moments(150, 3)
    table, per_row = tables(codes)  # type: ignore[arg-type]
    plain = torch.eye(150)
    nearest, found = (fit(weight, h, table, per_row=per_row) for h in (plain, hessian))
    by_inputs, by_weights = (
        [float(loss(weight, one.codes * one.scale, h.double()).sum()) for one in (found, nearest)]
        for h in (hessian, plain)
    )
    assert by_inputs[0] < 0.7 * by_inputs[1]
    assert by_weights[0] > by_weights[1]


def test_equally_sized_unrelated_inputs_give_the_formats_own_rounding() -> None:
    weight = torch.randn(9, 41, generator=torch.Generator().manual_seed(1))
    codes, scale = three_of_four.nearest(weight)
    found = fit(weight, torch.eye(41), three_of_four.table(), per_row=True)
    assert torch.equal(found.codes, codes) and torch.allclose(found.scale, scale, rtol=1e-5)


def test_rows_and_weights_of_zeros_have_the_scale_zero() -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    found = fit(weight, moments(8, 1), three_of_four.table(), per_row=True)
    assert found.scale[2] == 0 and bool((found.scale[[0, 1, 3]] > 0).all())
    assert fit(torch.zeros(4, 8), moments(8, 1), tables("ternary")[0], per_row=False).scale == 0
