"""Targets that make up for changed inputs: against the closed form, and by what they spare."""

import pytest
import torch
from torch import Tensor

from compress.quantize import drift, gptq
from compress.quantize.grid import Grid
from runtime.formats import dequantize


def moments(exact: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    return given.T @ given / len(given), (exact - given).T @ given / len(given)


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its inputs in the original, and what has become of them: noisy, and smaller than they were."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(48, 48, generator=generator)
    exact = torch.randn(900, 48, generator=generator) @ mix
    noise = torch.randn(900, 48, generator=generator) @ mix
    return torch.randn(33, 48, generator=generator), exact, 0.8 * exact + 0.05 * noise


def test_they_are_the_least_squares_weights(data: tuple[Tensor, Tensor, Tensor]) -> None:
    weight, exact, given = data
    hessian, moved = moments(exact, given)
    found = drift.targets(weight, hessian, moved, 1.0, 1e-6)
    wanted = torch.linalg.lstsq(given.double(), exact.double() @ weight.double().T).solution.T
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    assert float((weight - wanted).norm() / wanted.norm()) > 0.05
    half = drift.targets(weight, hessian, moved, 0.5, 1e-6)
    assert torch.allclose(half, (found + weight) / 2, atol=1e-5)
    assert torch.equal(drift.targets(weight, hessian, moved, 0.0, 0.01), weight)
    assert torch.equal(drift.targets(weight, hessian, torch.zeros_like(moved), 1.0, 0.01), weight)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rounded_outputs_come_nearer_the_originals(data: tuple[Tensor, Tensor, Tensor], bits: int) -> None:
    weight, exact, given = data
    hessian, moved = moments(exact, given)
    grid, errors = Grid(bits, 16), []
    for share in (0.0, 1.0):
        aim = drift.targets(weight, hessian, moved, share, 0.01)
        [rounded] = gptq.quantize_together([aim], hessian, grid, torch.float32)
        errors.append(float((exact @ weight.T - given @ dequantize(rounded.packed).T).norm()))
    assert errors[1] < 0.97 * errors[0]


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        drift.targets(torch.ones(3, 4), torch.eye(4), torch.eye(3), 1.0, 0.01)
