"""AWQ (Lin et al., 2306.00978): channels whose inputs are large are scaled up before the weights are rounded.

Every error here is measured through the inputs' Hessian H = Σ x xᵀ / tokens: the mean of ‖(W − Ŵ) x‖² over tokens is
tr((W − Ŵ) H (W − Ŵ)ᵀ), exactly, so a candidate costs N·K² operations however long the calibration text is (running the
layers again costs N·K·tokens: 16 times as much at 32 k tokens and K = 2048).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.grid import Grid, decode, encode, expect_finite, fit
from runtime.formats.tensors import group_width, round_scale

# Exponents on the line that the paper searches.
RATIOS = 20
# Rows of a layer that judge a candidate: ratios are ranked by differences far above what 1,024 paired rows leave open.
JUDGES = 1024
# Steps of the refinement in the exponents, from half the line's own step down.
_STEPS = (0.05, 0.025)
# How far a factor may go; the least keeps an activation scale of float16 out of its subnormals.
_LEAST, _MOST = 1e-4, 1e4
# Scales tried by the clip search, as parts of the one that covers the largest weight. Of equals the first is taken.
# Above 1: the codes have half a step less above zero than that scale asks for, and the largest weight may need it.
_SHRINKS = (1.0, 1.08, 1.04, *(1 - 0.03 * step for step in range(1, 18)))
# Weights that the clip search works on at once: what a core's cache holds of a few passes over them.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Fed:
    """One of the layers that a factor multiplies.

    weight      (N, K) float32.
    hessian     (K, K) float32: the mean of x xᵀ over the tokens that the layer sees; zeros where it saw none.
    grid        how the layer will be rounded.
    importance  what a squared error counts: one number (an expert's share of the tokens), or (N,) one an output.
    """

    weight: Tensor
    hessian: Tensor
    grid: Grid
    importance: Tensor | float = 1.0


def search_scale(
    layers: Sequence[Fed],
    absmean: Tensor,
    dtype: torch.dtype,
    *,
    tie: Callable[[Tensor], Tensor] | None = None,
    judges: int = JUDGES,
) -> Tensor:
    """The factor (K,) float32 that W is multiplied by (and x divided by) so that rounding W hurts the outputs least.

    Candidates are x̄^a / w̄^b, with x̄ the mean |x| of a channel and w̄ its mean |w| relative to its group's largest: the
    paper's line b = 0, the line b = 1 − a of its code, and then smaller and smaller steps away from the best in both
    exponents. The factor 1 is always among them, so the result is never judged worse than rounding alone.
    absmean  (K,): mean |x| per channel. A channel that is always 0 counts as the smallest that is not.
    dtype    what the scales of the weights are stored in.
    tie      makes channels that must share a factor equal (`folding.share`).
    judges   at most so many outputs of each layer, evenly spaced, judge the candidates.
    Raises ValueError for statistics that are not finite or do not fit the weights.
    """
    tie = tie or (lambda statistic: statistic)
    _check(layers, absmean)
    absmean = absmean.float()
    if bool((live := absmean > 0).any()):
        # Dead channels as large as the smallest live one: they matter least, but may wake on other text.
        absmean = torch.where(live, absmean, absmean[live].min())
    x_log = _log(tie(absmean))
    w_log = _log(tie(_relative_mean(layers)))
    layers = [_thin(layer, judges) for layer in layers]

    def loss(factor: Tensor) -> float:
        return sum(output_error(layer, _rounded(layer.weight, factor, layer.grid, dtype)) for layer in layers)

    seen: dict[tuple[float, float], float] = {}

    def at(a: float, b: float) -> float:
        key = (round(a, 6), round(b, 6))
        if key not in seen:
            seen[key] = loss(_factor(x_log, w_log, *key))
            if not math.isfinite(seen[key]):
                raise ValueError("the judged error is NaN or infinite")
        return seen[key]

    at(0.0, 0.0)
    for a in (step / RATIOS for step in range(1, RATIOS + 1)):
        at(a, 0.0)
        at(a, 1.0 - a)
    at(0.0, 1.0)
    return _factor(x_log, w_log, *_refine(at, min(seen, key=lambda key: seen[key])))


def search_clip(
    weight: Tensor, hessian: Tensor, grid: Grid, dtype: torch.dtype, shrinks: Sequence[float] = _SHRINKS
) -> tuple[Tensor, Tensor]:
    """Scale and zero (each (N, G) float32, as `grid.fit` gives them) that round each group best when it may be clipped.

    A smaller scale clips a group's largest weights and serves the others better. Each group is judged through its own
    block of the Hessian, as the paper judges it through its own inputs: N·K·group operations a candidate.
    weight   (N, K) float32, already multiplied by the factor; `hessian` (K, K) of inputs already divided by it.
    Raises ValueError for values that are not finite, and for groups that do not divide K.
    """
    expect_finite("a weight", weight)
    expect_finite("a Hessian", hessian)
    n, k = weight.shape
    scale, zero = fit(weight, grid, dtype)
    groups = scale.shape[1]
    # (G, width, width): what the inputs of a group have to do with each other.
    blocks = hessian.view(groups, k // groups, groups, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    step = max(1, _CHUNK // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        full, zeros, best = scale[rows], zero[rows], scale[rows]
        least = torch.full_like(full, torch.inf)
        for shrink in shrinks:
            tried = round_scale(full * shrink, dtype)
            error = weight[rows] - decode(encode(weight[rows], tried, zeros, grid), tried, zeros, grid)
            parts = error.view(*full.shape, -1).transpose(0, 1)
            loss = ((parts @ blocks) * parts).sum(dim=-1).T
            better = loss < least
            best, least = torch.where(better, tried, best), torch.where(better, loss, least)
        scale[rows] = best
    return scale, zero


def output_error(layer: Fed, rounded: Tensor) -> float:
    """Σ over outputs of importance · mean over tokens of the squared error that `rounded` (N, K) makes."""
    error = layer.weight - rounded
    # Rounding keeps the Hessian's quadratic form above zero but for float32's own error.
    per_output = ((error @ layer.hessian) * error).sum(dim=1, dtype=torch.float64).clamp(min=0)
    return float((per_output * layer.importance).sum())


def _refine(at: Callable[[float, float], float], best: tuple[float, float]) -> tuple[float, float]:
    """Coordinate descent over the two exponents: a step that helps is taken, one that does not is made smaller."""
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for da, db in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
                tried = (round(best[0] + da, 6), round(best[1] + db, 6))
                if -0.5 <= tried[0] <= 1.5 and -0.5 <= tried[1] <= 1.5 and at(*tried) < at(*best):
                    best, moved = tried, True
    return best


def _factor(x_log: Tensor, w_log: Tensor, a: float, b: float) -> Tensor:
    """x̄^a / w̄^b, largest and smallest balanced around 1."""
    exponent = a * x_log - b * w_log
    middle = (exponent.max() + exponent.min()) / 2
    return (exponent - middle).exp().clamp(_LEAST, _MOST)


def _log(statistic: Tensor) -> Tensor:
    """Logarithms around 0; 0 where the statistic is 0, as for a channel whose weights are all 0."""
    live = statistic > 0
    logs = torch.where(live, statistic, 1.0).log()
    middle = logs[live].mean() if bool(live.any()) else 0.0
    return torch.where(live, logs - middle, 0.0)


def _relative_mean(layers: Sequence[Fed]) -> Tensor:
    """(K,) mean over all outputs of |w| relative to the largest of its row and group."""
    total = torch.zeros(layers[0].weight.shape[1])
    for layer in layers:
        n, k = layer.weight.shape
        groups = layer.weight.abs().view(n, -1, group_width(k, layer.grid.group_size))
        largest = groups.amax(dim=-1, keepdim=True)
        total += (groups / torch.where(largest > 0, largest, 1.0)).view(n, k).sum(dim=0)
    return total / sum(len(layer.weight) for layer in layers)


def _rounded(weight: Tensor, factor: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    scaled = weight * factor
    scale, zero = fit(scaled, grid, dtype)
    return decode(encode(scaled, scale, zero, grid), scale, zero, grid) / factor


def _thin(layer: Fed, outputs: int) -> Fed:
    """At most `outputs` of the layer's outputs, evenly spaced, standing for all of them."""
    n = len(layer.weight)
    if n <= outputs:
        return layer
    kept = torch.arange(outputs) * n // outputs
    importance = layer.importance if isinstance(layer.importance, float) else layer.importance[kept]
    return Fed(layer.weight[kept], layer.hessian, layer.grid, importance * (n / outputs))


def _check(layers: Sequence[Fed], absmean: Tensor) -> None:
    if not layers:
        raise ValueError("a factor needs at least one layer to judge it")
    expect_finite("the mean |x| per channel", absmean)
    for layer in layers:
        expect_finite("a weight", layer.weight)
        expect_finite("a Hessian", layer.hessian)
        k = layer.weight.shape[1]
        if absmean.shape != (k,) or layer.hessian.shape != (k, k):
            raise ValueError(
                f"a layer of {k} inputs needs {k} channel means and a Hessian of {k} × {k}, found"
                f" {list(absmean.shape)} and {list(layer.hessian.shape)}"
            )
