"""How much each option of each unit damages the model, and what that says of the quality of an assignment.

One unit at a time is rounded as the run would round it, everything else stays, and KL(original ‖ changed) of the
output is averaged over text. Damages are added up, and one factor, fitted to models that were measured, makes the sum
a forecast of what is measured: a rank first, a figure only after the first measurement.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import Moments, Wants
from compress.best.space import Assignment, Option, Unit
from compress.errors import UserError
from compress.progress import Progress
from compress.quantize import gptq, rtn
from compress.quantize.grid import Grid
from compress.stages.sensitivity import divergence, recorded, replayed
from runtime.formats import dequantize

# Tokens that damage is measured on, those before them that GPTQ is fitted to, and tokens in one forward.
TOKENS, FITTED = 2048, 4096

Damages = tuple[tuple[float, ...], ...]
"""[unit][option] nats a token; 0 for a unit that stays."""


@torch.inference_mode()
def measure(model: Any, windows: Tensor, units: Sequence[Unit], blocks_at: str, progress: Progress) -> Damages:
    """The damage of every option of every unit.

    model    a transformers causal LM in float32, in eval mode; it is the same afterwards.
    windows  (S, T) int64 calibration tokens: some measure, others fit the codes.

    Raises UserError where the output is not finite (unit and option named).
    """
    blocks = list(model.get_submodule(blocks_at))
    count = max(1, TOKENS // windows.shape[1])
    held_out = windows[:count]
    # With a single window the codes are fitted to what they are measured on.
    fitting = windows[count : count + max(1, FITTED // windows.shape[1])] if len(windows) > count else held_out
    references = [recorded(model, blocks, window) for window in held_out.split(1)]
    fitted_on = [recorded(model, blocks, window)[0] for window in fitting.split(1)]
    done, total = 0, sum(len(unit.options) for unit in units)
    found: list[tuple[float, ...]] = []
    for unit in units:
        layers = {name: model.get_submodule(name) for name in unit.layers}
        hessian = None
        if any(option.method == "gptq" for option in unit.options):
            hessian = _hessian(model, blocks[: unit.block], layers[unit.layers[0]], fitting, fitted_on)
        damages: list[float] = []
        for option in unit.options:
            damage = 0.0
            if not option.keeps:
                with _rounded(layers, rounded(layers, option, hessian)):
                    for window, (outputs, logits) in zip(held_out.split(1), references, strict=True):
                        with replayed(blocks[: unit.block], outputs):
                            changed = model(window, use_cache=False).logits.flatten(0, 1)
                        damage += float(divergence(logits, changed))
                damage = max(0.0, damage / held_out.numel())
                if not math.isfinite(damage):
                    raise UserError(
                        f"{unit.name}: expected finite logits after rounding it to {option}, found others: check the "
                        "weights for NaN or infinity"
                    )
            damages.append(damage)
            done += 1
            progress("sensitivity", done, total)
        found.append(tuple(damages))
    return tuple(found)


def rounded(layers: Mapping[str, nn.Linear], option: Option, hessian: Tensor | None) -> dict[str, Tensor]:
    """The layers' weights (N, K) as a run would round them, read back in float32; `hessian` is of their inputs."""
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    if option.method != "gptq":
        return {
            name: dequantize(rtn.quantize(weight, option.scheme, option.group_size))
            for name, weight in weights.items()
        }
    assert hessian is not None
    grid = Grid(option.bits, option.group_size)
    made = gptq.quantize_together(list(weights.values()), hessian, grid, torch.bfloat16, search=True)
    return {name: dequantize(one.packed) for name, one in zip(weights, made, strict=True)}


def _hessian(
    model: Any, before: Sequence[nn.Module], layer: nn.Linear, windows: Tensor, outputs: Sequence[Sequence[Any]]
) -> Tensor:
    """The mean of x xᵀ (K, K) of what a layer reads."""
    moments = Moments(layer.in_features, Wants(hessian=True))
    hook = layer.register_forward_pre_hook(lambda _, given: moments.add(given[0]))
    try:
        for window, known in zip(windows.split(1), outputs, strict=True):
            with replayed(before, known):
                model(window, use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    return moments.hessian


@contextmanager
def _rounded(layers: Mapping[str, nn.Linear], weights: Mapping[str, Tensor]) -> Iterator[None]:
    before = {name: layer.weight for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.weight = nn.Parameter(weights[name], requires_grad=False)
        yield
    finally:
        for name, layer in layers.items():
            layer.weight = before[name]


@dataclass(frozen=True)
class QualityModel:
    """What an assignment's damages say of a figure of quality: figure = factor · Σ damages."""

    damages: Damages
    units: tuple[Unit, ...]
    factor: float = 1.0

    def total(self, assignment: Assignment) -> float:
        """The sum of the damages of an assignment."""
        return sum(
            row[unit.options.index(assignment[unit.name])] for unit, row in zip(self.units, self.damages, strict=True)
        )

    def predicted(self, assignment: Assignment) -> float:
        """The figure, as far as it is known."""
        return self.factor * self.total(assignment)

    def fitted(self, measured: Sequence[tuple[Assignment, float]]) -> "QualityModel":
        """With the factor that fits what was measured: the median over the models, 1 where there is none."""
        ratios = [max(figure, 0.0) / self.total(one) for one, figure in measured if self.total(one) > 0]
        return QualityModel(self.damages, self.units, max(median(ratios), 1e-9) if ratios else 1.0)
