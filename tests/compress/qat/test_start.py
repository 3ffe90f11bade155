"""Latent weights that stand for fitted codes, in layers and in whole models."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.qat.convert import rounded_layers
from compress.qat.fit import fit
from compress.qat.layers import BitLinear, Codes, rounded_codes
from compress.qat.start import fit_layer, fit_layers, tables, ternary_latents, three_of_four_latents
from compress.recipe.training_stages import Ternary
from compress.training.float_model import held_out_loss
from compress.training.float_model import load as load_plain
from runtime.formats import three_of_four
from tests.compress.qat.test_fit import moments
from tests.compress.qat.test_stage import converted, text

Tiny = Callable[..., Path]


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(inputs=st.integers(1, 90), outputs=st.integers(1, 9), power=st.floats(-2, 1), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_latent_weights_round_to_the_fitted_codes_and_scales(
    codes: Codes, dtype: torch.dtype, inputs: int, outputs: int, power: float, seed: int
) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 10**power
    table, per_row = tables(codes)
    fitted = fit(weight, moments(inputs, seed), table, per_row=per_row)
    latent = three_of_four_latents(fitted) if per_row else ternary_latents(fitted)
    found, scale = rounded_codes(latent, codes, dtype)
    # Of a scale that is (all but) 0 nothing can be asked.
    kept = (fitted.scale > 1e-3 * 10**power).expand(outputs, 1).flatten()
    assert torch.equal(found[kept], fitted.codes[kept].float())
    assert torch.allclose(scale.expand(outputs, 1)[kept], fitted.scale.expand(outputs, 1)[kept], rtol=2**-7)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_a_layer_computes_with_its_fitted_codes(codes: Codes) -> None:
    layer, hessian = BitLinear(70, 12, codes=codes), moments(70, 2)
    table, per_row = tables(codes)
    fitted = fit(layer.weight, hessian, table, per_row=per_row)
    before = layer.packed()
    fit_layer(layer, hessian)
    packed = layer.packed()
    assert torch.equal(packed.codes, fitted.codes) and not torch.equal(packed.codes, before.codes)
    assert torch.allclose(packed.scale, fitted.scale.expand(12, 1), rtol=2**-7)


@pytest.mark.parametrize("codes", ["ternary", "ternary-1.25"])
def test_fitted_models_answer_better_than_rounded_ones(tiny: Tiny, codes: Codes) -> None:
    folder, windows = tiny("llama"), text(24 * 33, 0).view(24, 33)
    rounded = converted(folder, Ternary(weights=codes)).model
    fitted = converted(folder, Ternary(weights=codes)).model
    assert fit_layers(fitted, windows) == []
    tokens = text(8 * 33, 1).view(8, 33)
    plain = load_plain(folder)

    def distance(model: torch.nn.Module) -> float:
        with torch.no_grad():
            wanted, given = (m(input_ids=tokens).logits for m in (plain, model))
        return float((given - wanted).norm() / wanted.norm())

    assert distance(fitted) < 0.85 * distance(rounded)
    assert math.isfinite(held_out_loss(fitted, tokens))
    if codes == "ternary-1.25":
        for layer in rounded_layers(fitted):
            three_of_four.encode(layer.packed().codes)


def test_layers_that_see_no_input_are_named_and_stay(tiny: Tiny) -> None:
    model = converted(tiny("llama"), Ternary()).model
    model.unused = BitLinear(8, 4)
    before = model.unused.weight.clone()
    assert fit_layers(model, text(2 * 9, 0).view(2, 9)) == ["unused"]
    assert torch.equal(model.unused.weight, before)


def test_binary_codes_have_no_table() -> None:
    with pytest.raises(ValueError, match="found binary"):
        tables("binary")
