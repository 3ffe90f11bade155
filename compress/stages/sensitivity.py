"""How much each layer's rounding damages the model, and which bits each layer therefore gets.

Damage is KL(original ‖ changed) of the model's output where one layer is rounded and everything else stays, averaged
over calibration text: estimated from gradients of all layers at once, for to try layer by layer takes hours. Damages of
different layers are taken to add up, as HAWQ-V3 (Yao et al., 2021) and many others do; the sum is a ranking, no
forecast.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.model.plan import Plan
from compress.model.structure import ModelStructure
from compress.progress import Progress, silent
from compress.quantize.grid import Grid, decode, encode, fit
from compress.quantize.knapsack import choose
from compress.recipe.block_stages import Quantize
from compress.stages import gradients
from compress.stages.gradients import Gradients
from runtime.formats.schemes import Scheme, stored_bytes

# A few thousand tokens rank layers; more change nothing but the time.
_TOKENS = 4096
_SCHEMES = {3: "int3", 4: "int4"}
# What engines compute in one product must have one scheme.
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Candidate:
    """What a layer may become: symmetric integers of `bits`; `group_size` inputs share a scale, 0: a whole row."""

    bits: int
    group_size: int

    @property
    def stored_as(self) -> Scheme:
        """int8 rows, or words of so many bits."""
        kind = "int8" if (self.bits, self.group_size) == (8, 0) else "int4"
        return Scheme(kind, self.bits, self.group_size, True, "float")


@dataclass(frozen=True)
class Unit:
    """Layers that change together. damage[c] and stored_bits[c] are those of candidate c, stored_bits with scales."""

    name: str
    layers: tuple[str, ...]
    weights: int
    damage: tuple[float, ...]
    stored_bits: tuple[int, ...]


@dataclass(frozen=True)
class Sensitivity:
    """The damage of every unit by every candidate, over so many `tokens`."""

    candidates: tuple[Candidate, ...]
    units: tuple[Unit, ...]
    tokens: int


def nearest(weight: Tensor, candidate: Candidate) -> Tensor:
    """A weight (N, K) rounded to nearest as it would be read back, float32.

    Scales are bfloat16. Raises ValueError where the groups do not divide a row.
    """
    grid = Grid(candidate.bits, candidate.group_size)
    scale, zero = fit(weight, grid, torch.bfloat16)
    return decode(encode(weight, scale, zero, grid), scale, zero, grid)


def fused_units(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layers that engines fuse, together: q, k and v; gate and up; all experts, whose loader has one scheme for all."""
    out: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if re.search(r"\.experts\.\d+\.", name):
            unit = "experts"
        else:
            unit = f"{parent}.{_TOGETHER[leaf]}" if leaf in _TOGETHER else name
        out.setdefault(unit, []).append(name)
    return {unit: tuple(layers) for unit, layers in out.items()}


def estimate(
    model: Any,
    windows: Tensor,
    units: Mapping[str, Sequence[str]],
    candidates: Sequence[Candidate],
    progress: Progress = silent,
) -> Sensitivity:
    """What rounding each unit to each candidate does to the model's output, from gradients (gradients.py).

    model      a transformers causal LM in float32, in eval mode; its parameters ask for no gradients afterwards.
    windows    (S, T) int64 calibration tokens: a few thousand tokens rank layers.
    units      name → the names of its nn.Linear modules (`fused_units`).
    progress   told ("gradients", windows done, windows).

    Raises UserError where logits or gradients are not finite.
    """
    layers = {name: model.get_submodule(name) for names in units.values() for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name}: expected an nn.Linear, found {type(layer).__name__}")
    seen = gradients.collect(model, windows, layers, progress)
    return Sensitivity(
        tuple(candidates),
        tuple(
            _unit(name, {part: layers[part] for part in names}, seen, candidates, windows.numel())
            for name, names in units.items()
        ),
        windows.numel(),
    )


@torch.no_grad()
def _unit(
    name: str,
    layers: Mapping[str, nn.Linear],
    seen: Mapping[str, Gradients],
    candidates: Sequence[Candidate],
    tokens: int,
) -> Unit:
    damage, stored = [0.0] * len(candidates), [0] * len(candidates)
    for part, layer in layers.items():
        weight = layer.weight.detach()
        for place, candidate in enumerate(candidates):
            stored[place] += 8 * stored_bytes(candidate.stored_as, *weight.shape)
        if (one := seen.get(part)) is None:
            continue
        rows, squares = weight[one.rows], one.squares
        for place, candidate in enumerate(candidates):
            damage[place] += one.lost(weight, (rows - nearest(rows, candidate)).square_(), squares) / tokens
    gradients.check_finite(name, damage)
    return Unit(
        name, tuple(layers), sum(layer.weight.numel() for layer in layers.values()), tuple(damage), tuple(stored)
    )


def allocate(found: Sensitivity, bits_per_weight: float) -> dict[str, Candidate]:
    """The candidate of every layer, by layer's name: the least damage within so many stored bits a weight.

    Scales count. Raises UserError where the budget is below what the candidates can reach.
    """
    sizes = [unit.stored_bits for unit in found.units]
    weights = sum(unit.weights for unit in found.units)
    least = sum(map(min, sizes)) / weights
    if least > bits_per_weight:
        raise UserError(
            f"bits_per_weight: expected at least {least:.3f}, which the smallest candidates take, found "
            f"{bits_per_weight:g}: raise the budget or allow fewer bits"
        )
    picks = choose([unit.damage for unit in found.units], sizes, bits_per_weight * weights)
    pairs = zip(found.units, picks, strict=True)
    return {layer: found.candidates[pick] for unit, pick in pairs for layer in unit.layers}


def choose_schemes(
    folder: Path, plan: Plan, model: ModelStructure, stage: Quantize, windows: Tensor, progress: Progress
) -> Plan:
    """The plan with the scheme for each layer that costs the model's output the least within `stage.bits_per_weight`.

    folder   the model's directory, of safetensors.
    plan     of int4 layers with the group sizes that divide their rows. Candidates are 3 and 4 bits with these, and 8
             bits per row.
    windows  (S, T) int64 calibration tokens, of which the first few thousand are looked at.

    Raises UserError for a budget that nothing fits, fused experts, and a model that transformers cannot load.
    """
    from transformers import AutoModelForCausalLM

    if any(".experts." in layer.module for layer in plan.layers.values()):
        raise UserError("quantize.method: sensitivity does not take experts apart yet: leave them out with ignore")
    assert stage.bits_per_weight is not None
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    names = [layer.module for layer in plan.layers.values()]
    by_group: dict[int, list[str]] = {}
    for layer in plan.layers.values():
        by_group.setdefault(layer.group_size, []).append(layer.module)
    group = max(by_group, key=lambda size: len(by_group[size]))
    fitting = [name for name in names if name in by_group[group]]
    candidates = (Candidate(3, group), Candidate(4, group), Candidate(8, 0))
    count = max(1, _TOKENS // windows.shape[1])
    found = estimate(loaded, windows[:count], fused_units(fitting), candidates, progress)
    chosen = allocate(found, bits_per_weight=stage.bits_per_weight)
    schemes = {name: (_SCHEMES.get(one.bits, "int8-dynamic"), one.group_size) for name, one in chosen.items()}
    return plan.with_schemes(schemes)
