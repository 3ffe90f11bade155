"""Estimated damages: the formula against its own definition, and against damages that are measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.best import estimate, quality
from compress.best.estimate import _Feedback
from compress.best.quality import TooLongError
from compress.best.space import KEEP, Option
from compress.errors import UserError
from compress.progress import silent
from tests.compress.best.test_quality import load, text, units_of

Tiny = Callable[..., Path]
TRIED = (
    KEEP,
    Option("int8-dynamic"),
    Option("int4", 64, "gptq"),
    Option("int3", 32, "gptq"),
    Option("trellis-3", method="gptq"),
)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(2, 40), st.booleans())
def test_feedback_spreads_errors_as_gptq_does(seed: int, rows: int, inputs: int, ordered: bool) -> None:
    """⟨G, r M⁻¹⟩² is on average Σ r² (G M⁻ᵀ)² over independent errors r: each one's share is exact."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * inputs, inputs, generator=drawn)
    hessian, gradient = x.T @ x / len(x), torch.randn(rows, inputs, generator=drawn)
    turns = torch.randperm(inputs, generator=drawn) if ordered else None
    made = _Feedback.of(hessian, turns)
    order = torch.arange(inputs) if turns is None else turns
    factor = made.factor.double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(inputs)
    rebuilt = factor @ made.spreads.double().diag() @ factor.T
    torch.testing.assert_close(rebuilt, damped[order][:, order].double(), rtol=1e-4, atol=1e-4)
    squares = made.squares(torch.stack([gradient, torch.zeros_like(gradient)]))
    assert bool(torch.allclose(made.squares(torch.stack([gradient, gradient])), 2 * squares))
    for place in range(inputs):
        # An error of 1 in one weight's rounding, in the order of rounding, and what the other weights make of it.
        error = torch.zeros(inputs, dtype=torch.float64)
        error[place] = 1.0
        spread = torch.empty(inputs, dtype=torch.float64)
        spread[order] = torch.linalg.solve(factor.T, error)
        expected = (gradient.double() @ spread).square()
        torch.testing.assert_close(squares[:, order[place]].double(), expected, rtol=1e-3, atol=1e-5)


def test_estimates_are_near_what_is_measured(tiny: Tiny) -> None:
    """Of a tiny model with random weights, layer for layer; docs/planner.md has those of the built-in pair."""
    path, windows = tiny("llama"), torch.cat([text(), text() % 291 + 3, text() % 207 + 50])
    units = units_of(path, TRIED)
    model = load(path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    told: list[tuple[str, int, int]] = []
    estimated = torch.tensor(estimate.estimate(model, windows, units, "model.layers", lambda *said: told.append(said)))
    assert told == [
        # Two windows to measure on, eight to fit codes to, two others.
        *(("gradients", done, 4) for done in range(5)),
        *(("sensitivity", done, len(units)) for done in range(len(units) + 1)),
    ]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    measured = torch.tensor(quality.measure(load(path), windows, units, "model.layers", silent))
    assert bool((estimated[:, 0] == 0).all())
    ratios = (measured / estimated)[:, 1:].log()
    # Without a bias, and in each case of the size.
    assert abs(float(ratios.median())) < 0.25 and float(ratios.abs().max()) < 1.1, ratios.exp()
    # The spread between layers and options is a hundredfold.
    logs = torch.stack([estimated[:, 1:].flatten().log(), measured[:, 1:].flatten().log()])
    assert float(torch.corrcoef(logs)[0, 1]) > 0.97


def test_one_window_serves_for_all(tiny: Tiny) -> None:
    units = units_of(tiny("llama"), TRIED[:3])[:2]
    found = estimate.estimate(load(tiny("llama")), text()[:1], units, "model.layers", silent)
    assert all(row[0] == 0.0 < row[1] < row[2] for row in found)


def test_what_is_not_finite_is_named(tiny: Tiny) -> None:
    path = tiny("llama")
    model = load(path)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(UserError, match="expected finite logits of the original model"):
        estimate.estimate(model, text(), units_of(path, TRIED[:2]), "model.layers", silent)


def test_measuring_ends_where_it_would_take_too_long(tiny: Tiny) -> None:
    path = tiny("llama")
    units = units_of(path, TRIED[:3])
    told: list[int] = []
    with pytest.raises(TooLongError) as found:
        quality.measure(
            load(path), text(), units, "model.layers", lambda _, done, total: told.append(done), seconds=1e-6
        )
    assert found.value.seconds > 1e-6 and not told
    assert len(quality.measure(load(path), text(), units[:1], "model.layers", silent, seconds=600)) == 1
