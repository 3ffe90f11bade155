"""Products of the calibration pass are float32's, whatever the processor would rather do."""

import torch

from compress.calibration.activations import matmul_precision


def test_products_keep_the_bits_of_their_factors() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(96, 320, generator=generator), torch.randn(320, 200, generator=generator)
    exact = left.double() @ right.double()
    setting = torch.backends.mkldnn.matmul.fp32_precision
    with matmul_precision():
        found = left @ right
        linear = torch.nn.functional.linear(left, right.T)
    assert torch.backends.mkldnn.matmul.fp32_precision == setting
    for product in (found, linear):
        assert float((product.double() - exact).norm() / exact.norm()) < 1e-5
    # What the test would see of factors rounded to bfloat16.
    rounded = left.bfloat16().double() @ right.bfloat16().double()
    assert float((rounded - exact).norm() / exact.norm()) > 1e-4
