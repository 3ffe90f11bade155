"""fp8 in Triton: every code exactly, float32's accuracy, the same bits at every width."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.formats import dequantize, fp8
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, join
from runtime.kernels.reference import packed_linear
from runtime.kernels.triton.linear import TritonLinear, triton_linear
from runtime.kernels.triton.weights import concatenate, gpu_weight

WIDTHS = (*range(1, 17), 17, 40)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Random values over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)


def packed(n: int, k: int, seed: int = 1) -> PackedWeight:
    """Rows that reach the largest codes and the subnormal ones."""
    return fp8.pack(random(n, k, seed=seed), bias=random(n, seed=seed + 1))


def layer(weight: PackedWeight, device: torch.device, splits: int = 1) -> TritonLinear:
    return triton_linear(gpu_weight(weight, None, device), splits=splits)


@pytest.mark.parametrize(("n", "k", "splits"), [(37, 200, 1), (70, 131, 1), (20, 400, 4), (1, 5, 1)])
def test_is_a_float32_product_of_the_same_bits_at_every_width(
    n: int, k: int, splits: int, device: torch.device
) -> None:
    weight, x = packed(n, k), random(max(WIDTHS), k, seed=3)
    mine = layer(weight, device, splits)
    dense = dequantize(weight).double()
    assert weight.bias is not None
    exact = x.double() @ dense.t() + weight.bias.double()
    size = x.double().abs() @ dense.abs().t() + weight.bias.double().abs()
    whole = mine(x.to(device)).cpu()
    # As product_float.py has it, and one more rounding: the scale's.
    assert ((whole.double() - exact).abs() <= (k + splits + 3) * 2.0**-23 * size).all()
    assert ((whole.double() - exact).norm() / exact.norm()) < 1e-6
    assert torch.allclose(whole, packed_linear(weight)(x), rtol=1e-4, atol=1e-5 * float(size.max()))
    for width in WIDTHS:
        assert torch.equal(mine(x[:width].to(device)).cpu(), whole[:width]), f"width {width}"


def test_every_code_is_its_value(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(fp8.DTYPE).view(-1, 1)
    scale = 2.0 ** torch.randint(-9, 9, (len(codes), 1), generator=torch.Generator().manual_seed(5)).float()
    mine = layer(PackedWeight(fp8.scheme(), codes, scale), device)
    assert torch.equal(mine(torch.ones(1, 1, device=device)).cpu(), (codes.float() * scale).t())


def test_joined_layers_have_the_bits_of_each(device: torch.device) -> None:
    first, second = packed(20, 64), packed(12, 64, seed=7)
    whole = concatenate([gpu_weight(weight, None, device) for weight in (first, second)])
    assert whole is not None and whole.shape == (32, 64) and whole.nbytes == 32 * 64 + 4 * 32 + 4 * 32
    x = random(5, 64, seed=8).to(device)
    expected = torch.cat([layer(weight, device)(x) for weight in (first, second)], dim=1)
    assert torch.equal(triton_linear(whole)(x), expected)
    moved = [replace(w, codes=w.codes.to(device), scale=w.scale.to(device)) for w in (first, second)]
    joined = join(moved, [None, None], [20, 12], Kernel("triton", True, "", exact=True))
    assert torch.equal(torch.cat(joined.split(x), dim=1), expected)


def test_refuses_what_does_not_fit() -> None:
    weight = packed(4, 8)
    for changed, message in (
        (replace(weight, codes=weight.codes.view(torch.int8)), "float8_e4m3fn"),
        (replace(weight, codes=torch.full((4, 8), torch.nan).to(fp8.DTYPE)), "found NaN"),
        (replace(weight, scale=torch.ones(4, 2)), "scale must be float"),
        (replace(weight, planes=True), "no Triton kernel for fp8|only int8 weights have planes"),
    ):
        with pytest.raises(ValueError, match=message):
            gpu_weight(changed, None, "cpu")
