"""examples/compare/two_planes.py: nine levels a row, and less error of the outputs than rounding to them leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor


def moments(inputs: int) -> Tensor:
    """Of inputs that depend on each other, as activations do."""
    rows = torch.randn(400, inputs) @ (torch.eye(inputs) + 0.3 * torch.randn(inputs, inputs) / inputs**0.5)
    return rows.T @ rows / len(rows)


@pytest.mark.parametrize("ratio", [None, 3.0])
def test_weights_become_two_planes_that_make_up_for_their_errors(compare: Any, ratio: float | None) -> None:
    torch.manual_seed(0)
    module, weight, hessian = compare("two_planes"), torch.randn(24, 60) * 0.02, moments(60)
    found = module.two_planes(weight, hessian, ratio)
    assert found.shape == weight.shape

    def lost(rounded: Tensor) -> float:
        error = weight - rounded
        return float(torch.einsum("nk,kl,nl->", error, hessian, error))

    for row in found:
        sizes = row.abs().unique()
        assert len(row.unique()) <= 9 and len(sizes) <= 5
        if ratio is not None:
            # Evenly spaced but for the rounding of the first scale to bfloat16: multiples of the second one.
            steps = sizes / sizes[sizes > 0].min()
            assert torch.allclose(steps, steps.round(), atol=0.03) and steps.max() < 4.03
    scales = module._fitted(weight, module._start(weight), ratio, torch.diag(hessian.diagonal()))
    nearest = module._values(module._nearest(weight, scales), scales)
    assert 0 < lost(found) < 0.9 * lost(nearest) < 0.2 * lost(torch.zeros_like(weight))


def test_the_nearest_level_is_the_nearest(compare: Any) -> None:
    module, values = compare("two_planes"), torch.randn(5, 30)
    scales = torch.tensor([[1.0, 0.3]]).expand(5, 2)
    found = module._values(module._nearest(values, scales), scales)
    levels = torch.tensor([a + b for a in (-1.0, 0.0, 1.0) for b in (-0.3, 0.0, 0.3)])
    assert torch.allclose((found - values).abs(), (values.unsqueeze(-1) - levels).abs().amin(-1))
