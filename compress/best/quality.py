"""How much each option of each unit damages the model, and what that says of the quality of an assignment.

One unit at a time is rounded as the run would round it, everything else stays, and KL(original ‖ changed) of the
output is averaged over text. Damages are added up, and one factor, fitted to models that were measured, makes the sum
a forecast of what is measured: a rank first, a figure only after the first measurement.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import Moments, Wants
from compress.best.replay import Output, divergence, recorded, replayed
from compress.best.space import CACHE, CACHES, KEEP, Assignment, Option, Unit
from compress.calibration.activations import Enough
from compress.errors import UserError
from compress.progress import Progress
from compress.quantize import folding, gptq, rtn, trellis
from compress.quantize.grid import Grid
from runtime.formats import dequantize

# Tokens that damage is measured on, those before them that GPTQ is fitted to, and tokens in one forward.
TOKENS, FITTED = 1024, 4096

Damages = tuple[tuple[float, ...], ...]
"""[unit][option] nats a token; 0 for a unit that stays."""


class TooLongError(Exception):
    """Measuring would take longer than it may: about so many `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {seconds:.0f} s")
        self.seconds = seconds


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the windows (S, T) that damage is measured on, and those that codes are fitted to."""
    count = max(1, TOKENS // windows.shape[1])
    held_out = windows[:count]
    # With a single window the codes are fitted to what they are measured on.
    fitting = windows[count : count + max(1, FITTED // windows.shape[1])] if len(windows) > count else held_out
    return held_out, fitting


# No inference mode: what a model keeps of its forwards (positions, mostly) may be read with gradients afterwards.
@torch.no_grad()
def measure(
    model: Any,
    windows: Tensor,
    units: Sequence[Unit],
    blocks_at: str,
    progress: Progress,
    seconds: float = math.inf,
) -> Damages:
    """The damage of every option of every unit.

    model    a transformers causal LM in float32, in eval mode; it is the same afterwards.
    windows  (S, T) int64 calibration tokens: some measure, others fit the codes.
    seconds  that it may take, about.

    Raises UserError where the output is not finite (unit and option named), and TooLongError where the forwards alone,
    or all of it at the pace of the first unit, would take longer than it may.
    """
    blocks, kind = list(model.get_submodule(blocks_at)), str(model.config.get_text_config().model_type)
    held_out, fitting = split(windows)
    began = time.monotonic()
    references = [recorded(model, blocks, window) for window in held_out.split(1)]
    whole = sum((len(unit.options) - 1) * (1 - unit.block / len(blocks)) for unit in units)
    _check_time(whole * (time.monotonic() - began), seconds)
    fitted_on = [recorded(model, blocks, window)[0] for window in fitting.split(1)]
    done, total = 0, sum(len(unit.options) for unit in units)
    found: list[tuple[float, ...]] = []
    hessians: dict[str, Tensor] = {}
    began = time.monotonic()
    for unit in units:
        layers = {name: model.get_submodule(name) for name in unit.layers}
        if unit.name not in hessians:
            # Of a block at a time: they are as large as the weights.
            together = {one.name: model.get_submodule(one.layers[0]) for one in units if one.block == unit.block}
            hessians = input_hessians(model, blocks, unit.block, together, fitting, fitted_on)
        damages: list[float] = []
        for option in unit.options:
            damage = 0.0
            if not option.keeps:
                factor = input_factor(blocks[unit.block], kind, layers) if option.has_tiles else None
                with _rounded(layers, rounded(layers, option, hessians[unit.name], factor)):
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
        if len(found) == 1:
            _check_time((time.monotonic() - began) * sum(one.weights for one in units) / unit.weights, seconds)
    return tuple(found)


def _check_time(needed: float, seconds: float) -> None:
    if needed > seconds:
        raise TooLongError(needed)


def rounded(
    layers: Mapping[str, nn.Linear], option: Option, hessian: Tensor, factor: Tensor | None = None
) -> dict[str, Tensor]:
    """The layers' weights (N, K) as a run would round them, read back in float32.

    hessian  (K, K) of their inputs; factor (K,): what a trellis has those divided by.
    """
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    if option.has_tiles:
        by = torch.ones(len(hessian)) if factor is None else factor
        scaled = [weight * by for weight in weights.values()]
        # A second pass takes a third of the time, and a fiftieth off the damage.
        own = hessian / by / by.unsqueeze(1)
        tiled = trellis.quantize_together(scaled, own, option.bits, torch.bfloat16, passes=1)
        return {name: dequantize(one.packed) / by for name, one in zip(weights, tiled, strict=True)}
    if option.method != "gptq":
        return {
            name: dequantize(rtn.quantize(weight, option.scheme, option.group_size)) for name, weight in weights.items()
        }
    grid = Grid(option.bits, option.group_size)
    made = gptq.quantize_together(list(weights.values()), hessian, grid, torch.bfloat16, order=True, search=True)
    return {name: dequantize(one.packed) for name, one in zip(weights, made, strict=True)}


def input_factor(block: nn.Module, model_type: str, layers: Mapping[str, nn.Linear]) -> Tensor | None:
    """What a run on a trellis divides the inputs of a unit of the block by (stages/ranges.py); None: nothing."""
    mine = {id(layer) for layer in layers.values()}
    if not folding.is_known(model_type):
        return None
    for fold in folding.folds(block, model_type):
        read = [block.get_submodule(path) for path in fold.linears]
        if isinstance(block.get_submodule(fold.previous), nn.Linear) and mine & set(map(id, read)):
            return trellis.channel_factors([one.get_parameter("weight") for one in read], partial(folding.share, fold))
    return None


def input_hessians(
    model: Any,
    blocks: Sequence[nn.Module],
    number: int,
    layers: Mapping[str, nn.Linear],
    windows: Tensor,
    outputs: Sequence[Sequence[Output]],
) -> dict[str, Tensor]:
    """The mean of x xᵀ (K, K) of what some layers of one block read, by their names in `layers`."""
    moments = {name: Moments(layer.in_features, Wants(hessian=True)) for name, layer in layers.items()}

    def seen(name: str) -> Any:
        return lambda _, given: moments[name].add(given[0])

    def stop(*_: Any) -> None:
        raise Enough

    hooks = [layer.register_forward_pre_hook(seen(name)) for name, layer in layers.items()]
    hooks.append(blocks[number].register_forward_hook(stop))
    try:
        for window, known in zip(windows.split(1), outputs, strict=True):
            with replayed(blocks[:number], known), suppress(Enough):
                model(window, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: one.hessian for name, one in moments.items()}


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
    """What an assignment's damages say of a figure of quality: figure = factor · Σ damages.

    caches  damages of CACHES, of those that may be chosen.
    """

    damages: Damages
    units: tuple[Unit, ...]
    factor: float = 1.0
    caches: tuple[float, ...] = (0.0,)

    def limited(self, units: tuple[Unit, ...]) -> "QualityModel":
        """The same of units with fewer options."""
        rows = tuple(
            tuple(row[before.options.index(option)] for option in after.options)
            for before, after, row in zip(self.units, units, self.damages, strict=True)
        )
        return replace(self, units=units, damages=rows)

    def total(self, assignment: Assignment) -> float:
        """The sum of the damages of an assignment."""
        layers = sum(
            row[unit.options.index(assignment[unit.name])] for unit, row in zip(self.units, self.damages, strict=True)
        )
        return layers + self.caches[CACHES.index(assignment.get(CACHE, KEEP))]

    def predicted(self, assignment: Assignment) -> float:
        """The figure, as far as it is known."""
        return self.factor * self.total(assignment)

    def fitted(self, measured: Sequence[tuple[Assignment, float]]) -> "QualityModel":
        """With the factor that fits what was measured: the median over the models, 1 where there is none."""
        ratios = [max(figure, 0.0) / self.total(one) for one, figure in measured if self.total(one) > 0]
        return replace(self, factor=max(median(ratios), 1e-9) if ratios else 1.0)
