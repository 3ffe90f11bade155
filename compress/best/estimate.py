"""What each option of each unit would damage, estimated from gradients: a few forwards, whatever the number of options.

KL(original ‖ changed) of a window's output is, for a small change E of a layer's weights, the mean of ½ ⟨G, E⟩²: G is
the gradient of the log probability of tokens drawn from the model itself (its Fisher information; FIT, 2210.08502,
ranks layers so). Errors of weights are taken to be independent of one another: of the square of a sum the sum of
squares is left, and all that must be known of E is how large each weight's own rounding error is.

- to nearest     E = r, the errors of rounding the weights.
- with feedback  E = r M⁻¹, where H = M D Mᵀ (gptq.py) and r are the errors of rounding what the columns before have
                 left, about as large as those of rounding the weights themselves.

So ⟨G, E⟩ = ⟨G M⁻ᵀ, r⟩, and the damage is ½ Σ r² (G M⁻ᵀ)². Some of a layer's outputs stand for all of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.best import quality
from compress.best.quality import Damages
from compress.best.space import Option, Unit
from compress.errors import UserError
from compress.progress import Progress
from compress.quantize import rtn, trellis
from compress.quantize.gptq import factorize
from compress.quantize.grid import Grid, decode, encode, fit
from compress.stages.sensitivity import recorded
from runtime.formats import dequantize

# Outputs of a layer that stand for all, and windows that gradients are taken of, at most.
_ROWS, _WINDOWS = 32, 8
_DAMPING = 0.01


@dataclass
class _Gradients:
    """Of a layer's weights (N, K), summed over a window.

    rows     (R,) int64: the outputs that are looked at.
    found    of each window (R, K).
    energy   (N,) of each output: squares of what it adds to the log probability.
    """

    rows: Tensor
    found: list[Tensor] = field(default_factory=list)
    energy: Tensor | float = 0.0

    def add(self, inputs: Tensor, back: Tensor) -> None:
        """Takes one window: inputs (T, K), and the gradient of the outputs (T, N)."""
        self.found.append(back[:, self.rows].T @ inputs)
        self.energy = self.energy + back.square().sum(dim=0)


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
    model.requires_grad_(False)
    layers = {name: model.get_submodule(name) for unit in units for name in unit.layers}
    with _gradients_of(model, layers) as gradients:
        drawn = torch.Generator().manual_seed(0)
        for done, window in enumerate(looked.split(1)):
            progress("gradients", done, len(looked))
            likely = model(window, use_cache=False).logits[0].log_softmax(dim=-1)
            if not bool(torch.isfinite(likely).all()):
                raise UserError("expected finite logits of the original model, found others: check its weights")
            tokens = torch.multinomial(likely.detach().exp(), 1, generator=drawn)
            likely.gather(1, tokens).sum().backward()
    progress("gradients", len(looked), len(looked))
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
            sums = _unit_damages(unit, mine, gradients, hessians[unit.name], factor)
            if not all(map(math.isfinite, sums)):
                raise UserError(
                    f"{unit.name}: expected finite gradients, found others: check the weights for NaN or infinity"
                )
            found.append(tuple(one / looked.numel() for one in sums))
    progress("sensitivity", len(units), len(units))
    return tuple(found)


@contextmanager
def _gradients_of(model: Any, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, _Gradients]]:
    """Collects gradients of the layers' weights while the model runs forwards, one window each, and backwards."""
    found: dict[str, _Gradients] = {}

    def seen(name: str) -> Any:
        def forward(layer: nn.Linear, given: tuple[Tensor, ...], out: Tensor) -> None:
            # Evenly spaced: heads lie one after the other.
            rows = torch.linspace(0, layer.out_features - 1, min(_ROWS, layer.out_features)).round().long()
            one, inputs = found.setdefault(name, _Gradients(rows)), given[0].detach()
            out.register_hook(lambda back: one.add(inputs.flatten(0, -2), back.flatten(0, -2)))

        return forward

    # Parameters ask for no gradients, so that the first activations have to.
    hooks = [model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_(True))]
    hooks += [layer.register_forward_hook(seen(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _unit_damages(
    unit: Unit,
    layers: Mapping[str, nn.Linear],
    gradients: Mapping[str, _Gradients],
    hessian: Tensor,
    factor: Tensor | None,
) -> list[float]:
    """For every option the sum over windows of what is lost.

    hessian  (K, K) of the layers' inputs; factor (K,): what a trellis has those divided by (None: nothing).
    """
    by = torch.ones(len(hessian)) if factor is None else factor
    scaled = hessian / by / by.unsqueeze(1)
    ordered = _Feedback.of(hessian, hessian.diagonal().argsort(descending=True, stable=True))
    tiled = _Feedback.of(scaled, None) if any(option.has_tiles for option in unit.options) else None
    damages = [0.0] * len(unit.options)
    for name, layer in layers.items():
        seen, weight = gradients[name], layer.weight.detach()
        rows = weight[seen.rows]
        # What all outputs lose, of what some lose.
        shares = weight.square().sum(dim=1) * seen.energy
        more = float(shares.sum() / shares[seen.rows].sum().clamp(min=1e-30))
        found = torch.stack(seen.found)
        plain, fed_back = found.square().sum(dim=0), ordered.squares(found)
        on_tiles = None if tiled is None else tiled.squares(found / by)
        for place, option in enumerate(unit.options):
            if option.keeps:
                continue
            if option.has_tiles:
                assert tiled is not None and on_tiles is not None
                lost = _tile_errors(rows * by, tiled.spreads, option).mul_(on_tiles)
            elif option.method == "gptq":
                lost = _grid_errors(rows, hessian.diagonal(), option).mul_(fed_back)
            else:
                packed = rtn.quantize(rows, option.scheme, option.group_size)
                lost = (rows - dequantize(packed)).square_().mul_(plain)
            damages[place] += 0.5 * more * float(lost.sum())
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

    def squares(self, gradients: Tensor) -> Tensor:
        """The sum of (G M⁻ᵀ)² over gradients (S, R, K), (R, K): inputs as they are."""
        columns = gradients.flatten(0, 1).T
        columns = columns if self.turns is None else columns[self.turns]
        solved = torch.linalg.solve_triangular(self.factor, columns, upper=True, unitriangular=True).square_()
        solved = solved if self.turns is None else solved[self.turns.argsort()]
        return solved.T.view(gradients.shape).sum(dim=0)


def _grid_errors(rows: Tensor, importance: Tensor, option: Option) -> Tensor:
    """(R, K) squared: of rows rounded to the grid whose scales GPTQ would choose."""
    grid = Grid(option.bits, option.group_size)
    scale, zero = fit(rows, grid, torch.bfloat16, importance, search=True)
    return (rows - decode(encode(rows, scale, zero, grid), scale, zero, grid)).square_()


def _tile_errors(rows: Tensor, spreads: Tensor, option: Option) -> Tensor:
    """(R, K) squared: of rows on a trellis, each input's error counted as much as it would be."""
    return (rows - dequantize(trellis.quantize_apart(rows, spreads, option.bits, torch.bfloat16).packed)).square_()
