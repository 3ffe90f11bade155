"""Quantisation-aware layers: what is trained is what the file holds and the kernels compute."""

import pytest
import torch
from torch import Tensor

from compress.qat.layers import QuantizedLinear, pack_rounded, round_inputs
from runtime.formats import dequantize, int4, int8, nf4, to_tensors
from runtime.formats.packed import Scheme
from runtime.kernels.reference import packed_linear

SCHEMES = [int8.scheme(), int4.scheme(32), int4.scheme(32, symmetric=False), int4.scheme(64, bits=3)]


def random(*shape: int, seed: int = 0, spread: float = 0.05) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def make(scheme: Scheme, int8_inputs: bool = True, stored: torch.dtype = torch.bfloat16) -> QuantizedLinear:
    layer = QuantizedLinear(128, 16, scheme=scheme, int8_inputs=int8_inputs, stored=stored)
    with torch.no_grad():
        layer.weight.copy_(random(16, 128))
    return layer


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_trained_layer_computes_what_the_kernel_does_with_its_packed_form(scheme: Scheme) -> None:
    layer, x = make(scheme), random(9, 128, seed=1, spread=1.0)
    exact = packed_linear(layer.packed())(x)
    trained = layer(x).detach()
    assert float((trained - exact).norm() / exact.norm()) < 1e-6
    float_inputs = make(scheme, int8_inputs=False)(x).detach()
    assert torch.allclose(float_inputs, x @ dequantize(layer.packed()).T, atol=1e-6)
    assert 1e-4 < float((float_inputs - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_scales_are_those_that_the_file_holds(stored: torch.dtype) -> None:
    for scheme in SCHEMES:
        packed = pack_rounded(random(16, 128), scheme, stored)
        tensors = to_tensors(packed, "x", stored)
        assert tensors["x.weight_scale"].dtype == stored
        assert torch.equal(tensors["x.weight_scale"].float().flatten(), packed.scale.flatten())


def test_gradients_pass_the_rounding() -> None:
    layer, x = make(int4.scheme(32)), random(9, 128, seed=1, spread=1.0).requires_grad_()
    above = random(9, 16, seed=2, spread=1.0)
    layer(x).backward(above)
    assert x.grad is not None and layer.weight.grad is not None
    assert torch.allclose(x.grad, above @ dequantize(layer.packed()), atol=1e-5)
    assert torch.allclose(layer.weight.grad, above.T @ round_inputs(x.detach(), 32), atol=1e-5)


def test_other_schemes_are_refused() -> None:
    for scheme in (nf4.scheme(64), int8.scheme("int8-tensor")):
        with pytest.raises(ValueError, match="training knows"):
            pack_rounded(random(16, 128), scheme, torch.bfloat16)
