"""BitLinear: codes of the packed format, straight-through gradients, λ, and the same result as the packed kernels."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.qat.layers import (
    BitLinear,
    Codes,
    absmean,
    bit_linear,
    blend,
    input_steps,
    pack_ternary,
    round_inputs,
    rounded_codes,
)
from runtime.formats import dequantize, ternary, three_of_four
from runtime.kernels.reference import packed_linear, quantize_rows

WEIGHTS: dict[str, Any] = {
    "inputs": st.integers(1, 70),
    "power": st.floats(-4, 4),
    "stored": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "seed": st.integers(0, 1000),
}


def random(*shape: int, seed: int = 0, spread: float = 0.05) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


@given(quarter=st.integers(1, 9), **WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_ternary_weights_are_the_formats_to_the_bit(
    quarter: int, inputs: int, power: float, stored: torch.dtype, seed: int
) -> None:
    weight = random(4 * quarter, inputs, seed=seed) * 10**power
    scale_dtype = torch.float16 if stored == torch.float16 else torch.bfloat16
    made, theirs = pack_ternary(weight, "ternary", stored), ternary.pack(weight, scale_dtype=scale_dtype)
    assert torch.equal(made.codes, theirs.codes) and torch.equal(made.scale, theirs.scale)
    assert ternary.to_tensors(made, "x", stored).keys() == {"x.weight", "x.weight_scale"}
    mean = weight.abs().mean(dtype=torch.float64)
    assert torch.equal(absmean(weight, scale_dtype), ternary.storable(mean, scale_dtype))


@given(outputs=st.integers(1, 9), **WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_three_of_four_weights_are_the_formats_to_the_bit(
    outputs: int, inputs: int, power: float, stored: torch.dtype, seed: int
) -> None:
    weight = random(outputs, inputs, seed=seed) * 10**power
    weight[0] = 0
    scale_dtype = torch.float16 if stored == torch.float16 else torch.bfloat16
    made, theirs = pack_ternary(weight, "ternary-1.25", stored), three_of_four.pack(weight, scale_dtype=scale_dtype)
    assert made.scheme == theirs.scheme
    assert torch.equal(made.codes, theirs.codes) and torch.equal(made.scale, theirs.scale)
    assert "x.weight_patterns" in three_of_four.to_tensors(made, "x", stored)


def test_binary_weights_are_signs_about_the_mean_and_fit_the_same_file() -> None:
    weight = random(16, 24) + 0.02
    made = pack_ternary(weight, "binary", torch.bfloat16)
    assert set(made.codes.unique().tolist()) == {-1, 1}
    assert torch.equal(made.codes == 1, weight > weight.double().mean())
    assert float(made.scale[0]) == pytest.approx(float(weight.abs().mean()), rel=2**-8)
    read = ternary.from_tensors(ternary.to_tensors(made, "x"), "x")
    assert torch.equal(read.codes, made.codes) and torch.equal(read.scale, made.scale)
    # A weight that is the mean everywhere is below no mean: all of it is −1.
    assert (pack_ternary(torch.full((4, 8), 0.3), "binary", torch.bfloat16).codes == -1).all()


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25", "binary"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_trained_layer_computes_what_the_kernel_does_with_its_packed_form(codes: Codes, biased: bool) -> None:
    layer = BitLinear(96, 32, biased, codes=codes)
    with torch.no_grad():
        layer.weight.copy_(random(32, 96))
    x = random(20, 96, seed=1, spread=1.0)
    x[3] = 0
    trained = layer(x).detach()
    packed = packed_linear(layer.packed())(x)
    if biased:
        packed = packed + layer.bias.detach()
    # Products of codes are exact integers on both sides; only the scaling afterwards rounds.
    assert torch.allclose(trained, packed, rtol=2e-6, atol=1e-7)
    assert not torch.allclose(trained, torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=0.05)


def test_inputs_are_rounded_as_kernels_round_them() -> None:
    x = random(50, 64, seed=2, spread=3.0)
    codes, step = quantize_rows(x)
    assert torch.equal(round_inputs(x), codes.float() * step.unsqueeze(1))
    grouped, steps = quantize_rows(x.view(50, 4, 16))
    assert torch.equal(round_inputs(x, 16), (grouped.float() * steps.unsqueeze(-1)).view(50, 64))
    assert torch.equal(input_steps(torch.zeros(2, 3)), torch.ones(2, 1))
    with pytest.raises(ValueError, match="do not divide 64"):
        round_inputs(x, 48)


def test_autocast_keeps_codes_exact() -> None:
    weight, x = random(64, 48), random(10, 48, seed=1, spread=1.0)
    exact = bit_linear(x, weight, None, "ternary", torch.bfloat16, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        half = bit_linear(x, weight, None, "ternary", torch.bfloat16, 1.0)
    assert half.dtype == torch.bfloat16
    # One rounding of the integer product and one of the result: nothing was lost before the product.
    assert torch.allclose(half.float(), exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_gradients_pass_the_rounding(codes: Codes) -> None:
    weight, x = random(8, 12).requires_grad_(), random(5, 12, seed=1, spread=1.0).requires_grad_()
    above = random(5, 8, seed=2, spread=1.0)
    bit_linear(x, weight, None, codes, torch.bfloat16, 1.0).backward(above)
    rounded = dequantize(pack_ternary(weight.detach(), codes, torch.bfloat16))
    assert x.grad is not None and weight.grad is not None
    # As if the layer were y = q(x) q(W)ᵀ with dq/dx = 1.
    assert torch.allclose(x.grad, above @ rounded, atol=1e-6)
    assert torch.allclose(weight.grad, above.T @ round_inputs(x.detach()), atol=1e-5)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_lambda_goes_from_the_float_layer_to_the_rounded_one(codes: Codes) -> None:
    weight, x = random(8, 12), random(5, 12, seed=1, spread=1.0)
    plain = torch.nn.functional.linear(x, weight)

    def at(share: float) -> Tensor:
        return bit_linear(x, weight, None, codes, torch.bfloat16, share)

    assert torch.allclose(at(0.0), plain, atol=1e-6)
    found, scale = rounded_codes(weight, codes, torch.bfloat16)
    half = (weight + found * scale) / 2
    assert torch.allclose(at(0.5), (x + round_inputs(x)) / 2 @ half.T, atol=1e-6)
    assert not torch.allclose(at(1.0), plain, atol=1e-2)


def test_blending_ends_in_the_very_bits_of_the_rounded_value() -> None:
    value, rounded = random(1000, spread=1.0), random(1000, seed=1, spread=100.0)
    assert torch.equal(blend(value, rounded, 1.0), rounded)
    assert not torch.equal(value + (rounded - value), rounded)
    value.requires_grad_()
    blend(value, rounded, 0.25).sum().backward()
    assert value.grad is not None and torch.equal(value.grad, torch.ones(1000))


def test_a_norm_inside_the_layer_is_trained_but_never_packed() -> None:
    layer = BitLinear(16, 8, norm=1e-6)
    x = random(4, 16, spread=5.0)
    assert torch.allclose(layer(x), layer(10 * x), atol=1e-4)
    layer(x).sum().backward()
    assert layer.norm is not None and layer.norm.weight.grad is not None
    with pytest.raises(ValueError, match="norm inside"):
        layer.packed()
    assert BitLinear(16, 8).packed().shape == (8, 16)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_scales_are_trained_beside_the_weights(stored: torch.dtype) -> None:
    layer, x = BitLinear(50, 6, codes="ternary-1.25", stored=stored, gains=True), random(9, 50, seed=1, spread=1.0)
    assert layer.gain is not None
    plain = layer.packed()
    with torch.no_grad():
        layer.gain.copy_(random(6, 1, seed=2, spread=0.3))
    packed, wanted = layer.packed(), plain.scale.double() * (1 + layer.gain.detach().double())
    assert torch.equal(packed.codes, plain.codes) and torch.equal(packed.scale, packed.scale.to(stored).float())
    assert torch.allclose(packed.scale.double(), wanted, rtol=2**-8) and not torch.equal(packed.scale, plain.scale)
    assert torch.allclose(layer(x).detach(), packed_linear(packed)(x), rtol=2e-6, atol=1e-7)
    # y = s (1 + gain) x q: by the gain it changes as the layer without one answers.
    above = random(9, 6, seed=3, spread=1.0)
    layer(x).backward(above)
    unscaled = round_inputs(x).double() @ plain.codes.double().T * plain.scale.double().flatten()
    assert layer.gain.grad is not None and layer.weight.grad is not None
    assert torch.allclose(layer.gain.grad.flatten().double(), (above * unscaled).sum(0), rtol=1e-4, atol=1e-6)
    assert torch.allclose(layer.weight.grad, above.T @ round_inputs(x) * (packed.scale / plain.scale), atol=1e-4)
    with torch.no_grad():
        layer.gain[3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        layer.packed()
    with pytest.raises(ValueError, match=r"only ternary-1\.25 has a scale for each output"):
        BitLinear(50, 6, gains=True)


def test_weights_that_are_not_finite_are_not_packed() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        pack_ternary(torch.full((4, 4), float("nan")), "ternary", torch.bfloat16)
