"""What each option of each unit would damage, estimated from gradients (compress/stages/gradients.py).

What a layer's damage takes to be known is how large each weight's own rounding error r is, of some outputs:

- to nearest     E = r, the errors of rounding the weights.
- with feedback  E = r M⁻¹, where H = M D Mᵀ (compress/quantize/gptq.py) and r are the errors of rounding what the
                 columns before have left, about as large as those of rounding the weights themselves. ⟨G, E⟩ is
                 ⟨G M⁻ᵀ, r⟩, and the damage ½ Σ r² (G M⁻ᵀ)².
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.best import quality
from compress.best.quality import Damages
from compress.best.replay import recorded
from compress.best.space import Option, Unit
from compress.progress import Progress
from compress.quantize import rtn, trellis
from compress.quantize.gptq import factorize
from compress.quantize.grid import Grid, decode, encode, fit
from compress.stages import gradients
from compress.stages.gradients import Gradients
from runtime.formats import dequantize

# Windows that gradients are taken of, at most.
_WINDOWS = 8
_DAMPING = 0.01


def estimate(model: Any, windows: Tensor, units: Sequence[Unit], blocks_at: str, progress: Progress) -> Damages:
    """The damage of every option of every unit, as `quality.measure` measures it.

    model    a transformers causal LM in float32, in eval mode; its parameters ask for no gradients afterwards.
    windows  (S, T) int64 calibration tokens: gradients are taken of some, and codes fitted to others.

    Raises UserError where logits or a gradient are not finite.
    """
    blocks, kind = list(model.get_submodule(blocks_at)), str(model.config.get_text_config().model_type)
    held_out, fitting = quality.split(windows)
    others = windows[len(held_out) + len(fitting) :] if len(windows) > len(held_out) else windows[:0]
    looked = torch.cat([held_out, others])[:_WINDOWS]
    layers = {name: model.get_submodule(name) for unit in units for name in unit.layers}
    seen = gradients.collect(model, looked, layers, progress)
    found: list[tuple[float, ...]] = []
    with torch.inference_mode():
        outputs = [recorded(model, blocks, window)[0] for window in fitting.split(1)]
        hessians: dict[str, Tensor] = {}
        for unit in units:
            progress("sensitivity", len(found), len(units))
            if unit.name not in hessians:
                together = {one.name: layers[one.layers[0]] for one in units if one.block == unit.block}
                hessians = quality.input_hessians(model, blocks, unit.block, together, fitting, outputs)
            mine = {name: layers[name] for name in unit.layers}
            factor = quality.input_factor(blocks[unit.block], kind, mine)
            sums = _unit_damages(unit, mine, seen, hessians[unit.name], factor)
            gradients.check_finite(unit.name, sums)
            found.append(tuple(one / looked.numel() for one in sums))
    progress("sensitivity", len(units), len(units))
    return tuple(found)


def _unit_damages(
    unit: Unit,
    layers: Mapping[str, nn.Linear],
    seen: Mapping[str, Gradients],
    hessian: Tensor,
    factor: Tensor | None,
) -> list[float]:
    """For every option the sum over windows of what is lost.

    hessian  (K, K) of the layers' inputs; factor (K,): what a trellis has those divided by (None: nothing).
    """
    by = torch.ones(len(hessian)) if factor is None else factor
    ordered = _Feedback.of(hessian, hessian.diagonal().argsort(descending=True, stable=True))
    has_tiles = any(option.has_tiles for option in unit.options)
    tiled = _Feedback.of(hessian / by / by.unsqueeze(1), None) if has_tiles else None
    damages = [0.0] * len(unit.options)
    for name, layer in layers.items():
        if (one := seen.get(name)) is None:
            continue  # the model never runs it
        weight = layer.weight.detach()
        rows, windows = weight[one.rows], torch.stack(one.windows)
        fed_back = ordered.squares(windows)
        on_tiles = None if tiled is None else tiled.squares(windows / by)
        for place, option in enumerate(unit.options):
            if option.keeps:
                continue
            if option.has_tiles:
                assert tiled is not None and on_tiles is not None
                errors, squares = _tile_errors(rows * by, tiled.spreads, option), on_tiles
            elif option.method == "gptq":
                errors, squares = _grid_errors(rows, hessian.diagonal(), option), fed_back
            else:
                packed = rtn.quantize(rows, option.scheme, option.group_size)
                errors, squares = (rows - dequantize(packed)).square_(), one.squares
            damages[place] += one.lost(weight, errors, squares)
    return damages


@dataclass(frozen=True)
class _Feedback:
    """M (K, K) and D (K,) of a Hessian, in the order `turns` of its inputs (None: as they are)."""

    factor: Tensor
    spreads: Tensor
    turns: Tensor | None

    @classmethod
    def of(cls, hessian: Tensor, turns: Tensor | None) -> "_Feedback":
        factor, spreads, _ = factorize(hessian, turns, _DAMPING)
        return cls(factor, spreads, turns)

    def squares(self, windows: Tensor) -> Tensor:
        """(R, K): the sum of (G M⁻ᵀ)² over gradients (S, R, K); inputs as they are."""
        columns = windows.flatten(0, 1).T
        columns = columns if self.turns is None else columns[self.turns]
        solved = torch.linalg.solve_triangular(self.factor, columns, upper=True, unitriangular=True).square_()
        solved = solved if self.turns is None else solved[self.turns.argsort()]
        return solved.T.view(windows.shape).sum(dim=0)


def _grid_errors(rows: Tensor, importance: Tensor, option: Option) -> Tensor:
    """(R, K) squared: of rows rounded to the grid whose scales GPTQ would choose."""
    grid = Grid(option.bits, option.group_size)
    scale, zero = fit(rows, grid, torch.bfloat16, importance, search=True)
    return (rows - decode(encode(rows, scale, zero, grid), scale, zero, grid)).square_()


def _tile_errors(rows: Tensor, spreads: Tensor, option: Option) -> Tensor:
    """(R, K) squared: of rows on a trellis, each input's error counted as much as it would be."""
    return (rows - dequantize(trellis.quantize_apart(rows, spreads, option.bits, torch.bfloat16).packed)).square_()
