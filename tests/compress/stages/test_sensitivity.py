"""What rounding layers damages, and what is chosen by it."""

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.stages import sensitivity
from compress.stages.sensitivity import (
    Candidate,
    Sensitivity,
    Unit,
    allocate,
    estimate,
    fused_units,
    nearest,
)
from runtime.formats import dequantize, int4, int8
from runtime.formats import tensors as stored
from runtime.formats.schemes import stored_bytes
from runtime.models.tiny import tiny_model

Tiny = Callable[..., Path]
CANDIDATES = (Candidate(2, 32), Candidate(4, 64), Candidate(8, 0))


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def linears(model: Any) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]


def single_units(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Each layer by itself."""
    return {name: (name,) for name in names}


def text(seed: int = 0, count: int = 3) -> Tensor:
    return torch.randint(1, 320, (count, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "mistral"])
def test_damage_is_near_the_divergence_of_the_changed_model(tiny: Tiny, kind: str) -> None:
    """Against doing it plainly: load, change one layer, run everything, compare all probabilities."""
    path = tiny(kind)
    model, tokens = load(path), text(count=12)
    names = linears(model)
    picked = [names[0], names[3], names[-1]]
    before = {name: p.clone() for name, p in model.named_parameters()}
    steps: list[tuple[int, int]] = []
    found = estimate(
        model, tokens, single_units(picked), CANDIDATES, lambda _, done, total: steps.append((done, total))
    )
    assert steps == [(i, 12) for i in range(13)] and found.tokens == tokens.numel()
    for unit, (c, candidate) in itertools.product(found.units, enumerate(CANDIDATES)):
        other = load(path)
        layer = other.get_submodule(unit.name)
        with torch.inference_mode():
            reference = model(tokens).logits.double().log_softmax(-1)
            layer.weight.data = nearest(layer.weight.data, candidate)
            changed = other(tokens).logits.double().log_softmax(-1)
        kl = float((reference.exp() * (reference - changed)).sum(-1).mean())
        assert unit.damage[c] == pytest.approx(kl, rel=0.5)
        assert unit.stored_bits[c] == 8 * stored_bytes(candidate.stored_as, *layer.weight.shape)
    for unit in found.units:
        assert unit.damage[0] > unit.damage[1] > unit.damage[2] > 0
    # The model is what it was: weights, forwards, hooks.
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["bart", "ctrl"])
def test_models_that_run_some_layers_never_or_scale_in_place(kind: str) -> None:
    """BART's decoder alone does not look at an encoder; CTRL scales what the embedding gives in place."""
    model = tiny_model(kind).float().eval()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]
    found = {unit.name: unit for unit in estimate(model, text(), single_units(names), CANDIDATES[1:]).units}
    never = {name for name in names if ".encoder_attn." in name}
    assert bool(never) == (kind == "bart") and len(found) == len(names)
    for name, unit in found.items():
        assert unit.stored_bits[0] > 0 and all((damage == 0) == (name in never) for damage in unit.damage), name


def test_layers_that_gradients_do_not_reach_are_named() -> None:
    """Reformer's blocks run without gradients, and make theirs up afterwards."""
    model = tiny_model("reformer").float().eval()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    with pytest.raises(UserError, match=r"layers\.\d+\..*expected gradients of the model's output to reach this layer"):
        estimate(model, text(), single_units(names), CANDIDATES[1:])


def test_layers_that_change_together(tiny: Tiny) -> None:
    model = load(tiny("llama"))
    units = fused_units(linears(model))
    assert list(units) == [
        f"model.layers.{n}.{part}"
        for n in (0, 1)
        for part in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")
    ]
    assert [name.rpartition(".")[2] for name in units["model.layers.1.self_attn.qkv"]] == ["q_proj", "k_proj", "v_proj"]
    found = estimate(model, text(), {"qkv": units["model.layers.1.self_attn.qkv"]}, CANDIDATES[:1])
    alone = estimate(model, text(), single_units(found.units[0].layers), CANDIDATES[:1])
    assert found.units[0].stored_bits[0] == sum(unit.stored_bits[0] for unit in alone.units)
    assert found.units[0].weights == sum(unit.weights for unit in alone.units)
    assert found.units[0].damage[0] == pytest.approx(sum(unit.damage[0] for unit in alone.units))


def test_all_experts_are_one_unit() -> None:
    names = [f"model.layers.{b}.mlp.experts.{e}.{p}_proj" for b in range(2) for e in range(3) for p in ("gate", "down")]
    assert fused_units(["model.layers.0.self_attn.o_proj", *names]) == {
        "model.layers.0.self_attn.o_proj": ("model.layers.0.self_attn.o_proj",),
        "experts": tuple(names),
    }


def test_weights_that_are_not_finite(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny("llama"))
    name = linears(model)[0]
    monkeypatch.setattr(sensitivity, "nearest", lambda weight, candidate: weight * float("nan"))
    with pytest.raises(UserError, match=rf"{name}: expected finite gradients, found others"):
        estimate(model, text(), single_units([name]), CANDIDATES)
    model.get_submodule(name).weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="expected finite logits of the original model"):
        estimate(model, text(), single_units([name]), CANDIDATES)


@pytest.mark.parametrize(("n", "k"), [(48, 128), (5, 64), (7, 160)])
def test_sizes_are_the_files(n: int, k: int) -> None:
    weight = torch.randn(n, k)
    packed = int8.pack(weight)
    assert stored_bytes(Candidate(8, 0).stored_as, n, k) == stored.tensor_bytes(int8.to_tensors(packed, "layer"))
    for group in (32, 0):
        packed = int4.pack(weight, group)
        assert stored_bytes(Candidate(4, group).stored_as, n, k) == stored.tensor_bytes(
            int4.to_tensors(packed, "layer")
        )


def test_rounding_to_nearest_is_the_format_s() -> None:
    weight = torch.randn(16, 96)
    assert torch.equal(nearest(weight, Candidate(4, 32)), dequantize(int4.pack(weight, 32)))
    errors = [float((nearest(weight, Candidate(bits, 32)) - weight).norm()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert len(nearest(weight, Candidate(2, 0))[0].unique()) <= 4
    with pytest.raises(ValueError, match="groups of 64"):
        nearest(weight, Candidate(4, 64))


def made() -> Sensitivity:
    """Two layers: rounding the first hurts more."""
    units = (
        Unit("a", ("a",), 100, (10.0, 1.0, 0.1), (200, 400, 800)),
        Unit("b", ("b.q", "b.k"), 100, (0.5, 0.1, 0.01), (200, 400, 800)),
    )
    return Sensitivity((Candidate(2, 0), Candidate(4, 0), Candidate(8, 0)), units, 1)


def test_bits_go_where_they_are_needed() -> None:
    assert {n: c.bits for n, c in allocate(made(), bits_per_weight=5.0).items()} == {"a": 8, "b.q": 2, "b.k": 2}
    assert {n: c.bits for n, c in allocate(made(), bits_per_weight=4.0).items()} == {"a": 4, "b.q": 4, "b.k": 4}
    assert {n: c.bits for n, c in allocate(made(), bits_per_weight=8.0).items()} == {"a": 8, "b.q": 8, "b.k": 8}


def test_budgets_out_of_reach() -> None:
    with pytest.raises(UserError, match=r"bits_per_weight: expected at least 2\.000.*found 1\.9"):
        allocate(made(), bits_per_weight=1.9)


def test_mixed_bits_beat_uniform_ones_of_their_size(tiny: Tiny) -> None:
    """On the whole model, all layers rounded at once: what the sum of single damages promises holds."""
    model, tokens = load(tiny("llama")), text()
    names = linears(model)
    # As in real models, some layers matter more: here the last block's outputs are made loud.
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(8)
    candidates = (Candidate(2, 32), Candidate(3, 32), Candidate(4, 32), Candidate(8, 0))
    found = estimate(model, tokens, single_units(names), candidates)
    uniform = dict.fromkeys(names, Candidate(3, 32))
    budget = sum(unit.stored_bits[1] for unit in found.units) / sum(unit.weights for unit in found.units)
    mixed = allocate(found, bits_per_weight=budget)
    assert len(set(mixed.values())) > 1

    def damage(choice: dict[str, Candidate]) -> float:
        other, size = copy.deepcopy(model), 0
        with torch.inference_mode():
            for name, candidate in choice.items():
                layer = other.get_submodule(name)
                size += 8 * stored_bytes(candidate.stored_as, *layer.weight.shape)
                layer.weight.data = nearest(layer.weight.data, candidate)
            before, after = (one(tokens).logits.double().log_softmax(-1) for one in (model, other))
        assert size <= budget * sum(unit.weights for unit in found.units)
        return float((before.exp() * (before - after)).sum(-1).mean())

    assert damage(mixed) < 0.8 * damage(uniform)
