"""Recipes that are decided or measured over the whole model: bits by sensitivity, and scales of the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UserError
from compress.model.plan import Plan
from compress.pipeline import compress, forecast
from compress.records import RunFacts
from runtime import load

Tiny = Callable[..., Path]


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., tuple[Path, RunFacts]]:
    text = tmp_path / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))

    def run_it(model: Path, recipe: dict[str, Any], out: str = "out") -> tuple[Path, RunFacts]:
        file = tmp_path / "own.yaml"
        file.write_text(json.dumps(recipe))
        kept: list[RunFacts] = []

        def report(facts: RunFacts, *rest: Any) -> dict[str, Any]:
            kept.append(facts)
            return {}

        options = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 3}
        compress(model, file, tmp_path / out, report=report, **options)
        return tmp_path / out, kept[0]

    return run_it


def mixed(bits: float) -> dict[str, Any]:
    return {"stages": [{"quantize": {"method": "sensitivity", "bits_per_weight": bits, "group_size": 32}}]}


def bits_of(facts: RunFacts) -> float:
    return 8 * sum(layer.stored_bytes for layer in facts.layers) / sum(layer.weights for layer in facts.layers)


def test_the_forecast_counts_the_bits_that_were_chosen(tiny: Tiny, go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Plan] = []
    original = forecast.forecast

    def keep(source: Any, plan: Plan, *rest: Any) -> Any:
        planned.append(plan)
        return original(source, plan, *rest)

    monkeypatch.setattr(forecast, "forecast", keep)
    _, facts = go(tiny("llama", num_hidden_layers=4), mixed(4.6))
    [plan] = planned
    schemes = {layer.prefix: layer.scheme for layer in plan.layers.values()}
    assert schemes == {layer.name: layer.scheme for layer in facts.layers} and len(set(schemes.values())) > 1


@pytest.mark.parametrize("budget", [4.6, 6.0])
def test_bits_go_where_they_help_within_the_budget(tiny: Tiny, go: Any, budget: float) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("llama", num_hidden_layers=4)
    out, facts = go(model, mixed(budget))
    assert bits_of(facts) <= budget
    assert len({layer.scheme for layer in facts.layers}) > 1
    assert facts.calibration["samples_used"] == 3
    # transformers reads the mixture, and what engines compute in one product has one scheme.
    tokens = torch.arange(4, 20).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)(tokens).logits.detach()
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits.detach()
    assert float((theirs - original).norm() / original.norm()) < 0.5
    schemes = {layer.name: layer.scheme for layer in facts.layers}
    for number in range(4):
        block = f"model.layers.{number}.self_attn"
        assert len({schemes[f"{block}.{name}_proj"] for name in "qkv"}) == 1
    assert load(out / "model").decoder.vocab_size == original.shape[-1]


def test_a_budget_below_everything_is_refused(tiny: Tiny, go: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bits_per_weight: expected at least"):
        go(tiny("llama"), mixed(2.5))
    assert not (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_cache_recipe_leaves_the_weights_and_adds_scales(tiny: Tiny, go: Any, kind: str) -> None:
    model = tiny("llama")
    out, facts = go(model, {"kv": {"scheme": kind}})
    assert facts.layers == () and facts.calibration["samples_used"] == 3
    decoder = load(out / "model").decoder
    assert decoder.kv.kind == kind and decoder.kv.key_factors
    assert load(model).decoder.kv.kind == "float32"
    again, _ = go(model, {"kv": {"scheme": kind}}, out="again")
    assert (out / "manifest.json").read_bytes() == (again / "manifest.json").read_bytes()
