"""Damages are divergences of the changed model, rounded as a run rounds it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import Recipe, compress
from compress.best import quality
from compress.best.quality import QualityModel
from compress.best.space import KEEP, OPTIONS, Option, Unit, find_units, make_recipe
from compress.model.source import open_sources
from compress.model.structure import read_structure
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

Tiny = Callable[..., Path]
TRIED = (KEEP, Option("int8-dynamic"), Option("int4", 64, "gptq"), Option("int2", 32, "gptq"))


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def units_of(path: Path, options: tuple[Option, ...] = OPTIONS) -> tuple[Unit, ...]:
    source, _ = open_sources(str(path), None)
    return find_units(source.shapes(), read_structure(source.path), options)


def text() -> Tensor:
    return torch.randint(1, 320, (4, 512), generator=torch.Generator().manual_seed(0))


def test_damage_is_the_divergence_of_the_changed_model(tiny: Tiny) -> None:
    path, windows = tiny("llama"), text()
    units = [unit for unit in units_of(path, TRIED) if unit.block == 1][:2]
    model = load(path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    told: list[tuple[int, int]] = []
    found = quality.measure(model, windows, units, "model.layers", lambda _, done, total: told.append((done, total)))
    assert told == [(i, 8) for i in range(1, 9)]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    held_out = windows[: quality.TOKENS // 512]
    with torch.inference_mode():
        reference = model(held_out).logits.double().log_softmax(-1)
        for unit, row in zip(units, found, strict=True):
            assert row[0] == 0.0 < row[1] < row[2] < row[3]
            changed = load(path)
            layers = {name: changed.get_submodule(name) for name in unit.layers}
            for name, weight in quality.rounded(layers, TRIED[1], torch.empty(0)).items():
                layers[name].weight.data = weight
            logits = changed(held_out).logits.double().log_softmax(-1)
            kl = float((reference.exp() * (reference - logits)).sum(-1).mean())
            assert row[1] == pytest.approx(kl, rel=1e-3)


def test_rounding_to_nearest_is_the_runs(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    units = units_of(path)
    chosen = {unit.name: Option("int8-dynamic") for unit in units}
    recipe = make_recipe(units, chosen, "", {})
    assert Recipe.model_validate(recipe.to_dict()) == recipe
    run = compress(path, recipe, tmp_path / "run", samples=2, seq_len=32, report=lambda *_: None)
    model, written = load(path), open_checkpoint(run.model)
    for unit in units[:3]:
        layers = {name: model.get_submodule(name) for name in unit.layers}
        for name, weight in quality.rounded(layers, chosen[unit.name], torch.empty(0)).items():
            packed = written.weight(name)
            assert isinstance(packed, PackedWeight) and torch.equal(dequantize(packed), weight)


def test_one_factor_makes_the_sum_a_forecast() -> None:
    units = tuple(Unit(name, (name,), (name,), ((8, 64),), 0, TRIED) for name in ("a", "b"))
    model = QualityModel(((0.0, 0.1, 0.2, 0.4), (0.0, 0.3, 0.5, 0.9)), units)
    one, other = {"a": TRIED[1], "b": TRIED[2]}, {"a": TRIED[0], "b": TRIED[3]}
    assert model.total(one) == pytest.approx(0.6) and model.predicted(one) == pytest.approx(0.6)
    fitted = model.fitted([(one, 1.2), (other, 1.8)])
    assert fitted.factor == pytest.approx(2.0) and fitted.predicted(other) == pytest.approx(1.8)
    # A model that was measured to be better than the original says nothing below nothing.
    assert model.fitted([(one, -0.5)]).predicted(one) >= 0.0
    assert model.fitted([]).factor == 1.0
