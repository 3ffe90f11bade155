"""kernels/exact.py: right against float64, and the same bits wherever a row lies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.kernels import exact


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40))
def test_exp_is_within_two_units_in_the_last_place(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    want = torch.exp(x.clamp(max=88.3).double())
    got = exact.exp(x).double()
    normal = x >= -87.0
    assert ((got - want).abs()[normal] <= 2 * 2.0**-23 * want[normal]).all()
    assert (got[~normal] < 1e-37).all()


def test_exp_of_minus_infinity_is_zero_and_of_zero_is_one() -> None:
    assert exact.exp(torch.tensor([float("-inf"), 0.0])).tolist() == [0.0, 1.0]


@example([-0.0396, 0.0508])
@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40))
def test_erf_is_near_and_odd(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert ((exact.erf(x).double() - torch.erf(x.double())).abs() <= 7e-7).all()
    assert torch.equal(exact.erf(-x)[x != 0], -exact.erf(x)[x != 0])


def test_elementwise_bits_do_not_depend_on_the_place() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 5
    for function in (exact.exp, exact.sigmoid, exact.tanh, exact.erf):
        whole = function(x)
        assert all(torch.equal(function(x[i : i + 1]), whole[i : i + 1]) for i in range(0, 1000, 7))


@pytest.mark.parametrize("size", [1, 2, 3, 37, 64, 512])
def test_tree_sum(size: int) -> None:
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    assert torch.allclose(exact.tree_sum(x).double(), x.double().sum(-1), atol=1e-5)
    assert torch.equal(exact.tree_sum(x)[4:5], exact.tree_sum(x[4:5]))


def test_cos_and_sin_against_exact_ones() -> None:
    """Within a unit in the last place of float32, over all angles of long texts and close to multiples of π / 2."""
    turns = torch.arange(0, 2000, dtype=torch.float64) * (math.pi / 2)
    x = torch.cat((torch.arange(0, 1 << 20, 97), turns, torch.linspace(-4, 4, 999).double(), torch.tensor([3e7])))
    cos, sin = exact.cos_sin(x.float())
    for found, function in ((cos, math.cos), (sin, math.sin)):
        wanted = torch.tensor([function(value) for value in x.float().tolist()], dtype=torch.float64)
        assert ((found.double() - wanted).abs() <= 2.0**-23 * wanted.abs()).all()


def test_powers_are_rounded_once() -> None:
    exponents = torch.arange(0, 64, dtype=torch.float32) / 64
    wanted = np.array([math.pow(500_000.0, e) for e in exponents.tolist()])
    found = exact.powers(500_000.0, exponents).numpy()
    assert (np.abs(found - wanted) <= 0.500001 * np.spacing(found)).all()
