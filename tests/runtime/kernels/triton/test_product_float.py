"""Float layers in Triton: float32's accuracy from 16-bit weights, the same bits at every width."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.kernels.triton.linear import TritonLinear, triton_linear
from runtime.kernels.triton.weights import gpu_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (1, 2, 5, 16, 17, 40)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Random values over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)


def layer(dtype: torch.dtype, n: int, k: int, device: torch.device, splits: int = 1) -> TritonLinear:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    return triton_linear(gpu_weight(weight, random(n, seed=2), device), splits=splits)


def bound(layer: TritonLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product, and how far one of float32 sums may be from it (product_float.py)."""
    weight, bias = layer.weight.codes.double().cpu(), layer.weight.bias
    assert bias is not None
    exact = x.double() @ weight.t() + bias.double().cpu()
    size = x.double().abs() @ weight.abs().t() + bias.double().abs().cpu()
    return exact, (x.shape[1] + layer.splits + 2) * 2.0**-23 * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "splits"), [(37, 200, 1), (70, 131, 1), (20, 400, 4), (20, 300, 2), (1, 5, 1)])
def test_is_a_float32_product_of_the_same_bits_at_every_width(
    dtype: torch.dtype, n: int, k: int, splits: int, device: torch.device
) -> None:
    mine = layer(dtype, n, k, device, splits)
    x = random(max(WIDTHS), k, seed=3)
    exact, error = bound(mine, x)
    whole = mine(x.to(device)).cpu()
    assert ((whole.double() - exact).abs() <= error).all()
    # The bound is what tensor cores could do at worst. A cut into fewer terms would be far above this one.
    assert ((whole.double() - exact).norm() / exact.norm()) < 1e-6
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].to(device)).cpu(), whole[:width]), f"width {width}"


def test_rows_of_any_stride_and_a_residual(device: torch.device) -> None:
    mine = layer(torch.bfloat16, 20, 64, device)
    both = random(3, 128, seed=5).to(device)
    residual = random(3, 20, seed=6).to(device)
    x = both[:, 64:]
    expected = mine(x.contiguous()) + residual
    assert torch.equal(mine.product(x, residual=residual), expected)
    assert torch.equal(mine.product(x.t().contiguous().t(), residual=residual), expected)


def test_refuses_other_inputs(device: torch.device) -> None:
    mine = layer(torch.bfloat16, 20, 64, device)
    with pytest.raises(ValueError, match=r"\(T, 64\) float32"):
        mine(torch.zeros(2, 63, device=device))
    with pytest.raises(ValueError, match=r"\(T, 64\) float32"):
        mine(torch.zeros(2, 64, device=device, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float weight must be"):
        gpu_weight(torch.zeros(2, 2, dtype=torch.int8), None, device)
