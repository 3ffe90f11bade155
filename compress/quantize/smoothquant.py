"""SmoothQuant (Xiao et al., 2211.10438): outlier channels move from the activations into the weights, for W8A8."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from runtime.formats import dequantize, int8
from runtime.formats.int8 import LIMIT

# Parts of the full range that the search tries.
_SHRINKS = tuple(1 - 0.02 * step for step in range(36))


def input_scale(absmax: Tensor) -> Tensor:
    """() float32: the scale whose last code is `absmax` (), a range from any observer (largest |x|, percentile, MSE).

    Inputs that are always 0 have the scale 1: every scale is right for them, and 0 would divide. Raises ValueError for
    a range that is negative or not finite.
    """
    bound = absmax.float().reshape(())
    if not bool(torch.isfinite(bound)) or float(bound) < 0:
        raise ValueError(f"an input range must be finite and not negative, found {float(bound)}")
    scale = bound / LIMIT
    # A scale below the normal numbers has lost digits, and the inputs' range with it.
    return scale if float(scale) >= torch.finfo(torch.float32).tiny else torch.ones(())


def round_tensor(x: Tensor, scale: Tensor) -> Tensor:
    """(…, K) what the kernels make of x with one static scale."""
    return torch.round(x / scale).clamp_(-LIMIT, LIMIT).mul_(scale)


def round_tokens(x: Tensor) -> Tensor:
    """(…, K) what the kernels make of x with a scale measured for each token."""
    absmax = x.abs().amax(dim=-1, keepdim=True)
    return round_tensor(x, torch.where(absmax > 0, absmax / LIMIT, 1.0))


def search_input_scale(
    rows: Tensor, absmax: Tensor, weights: Sequence[Tensor], shrinks: Sequence[float] = _SHRINKS
) -> Tensor:
    """() float32: the static scale that hurts the outputs least, `absmax`'s own or a smaller one.

    A smaller range clips the largest inputs and serves all others better. What counts is the outputs' error, Σ over
    layers of ‖(X̂ − X) Wᵀ‖² = tr(E G Eᵀ) with G = Σ WᵀW: it knows which channels matter, as an observer of x alone does
    not.
    rows     (T, K) float32: input rows drawn evenly from the calibration text, and those with the largest values where
             they are known: what the search does not see it clips.
    absmax   () the largest |x| of all of the text, the range where nothing is clipped.
    weights  (N, K) float32 of the layers that read these inputs and share the scale.
    Raises ValueError for rows or a range that are not finite.
    """
    if rows.dim() != 2 or not len(rows) or not bool(torch.isfinite(rows).all()):
        raise ValueError("a range is judged on finite input rows, found none, or NaN or infinity among them")
    full = input_scale(absmax)
    gram = torch.zeros(rows.shape[1], rows.shape[1])
    for weight in weights:
        gram.addmm_(weight.T, weight)
    best, least = full, torch.inf
    for shrink in shrinks:
        scale = full * shrink
        error = round_tensor(rows, scale).sub_(rows)
        loss = float(((error @ gram) * error).sum(dtype=torch.float64))
        if loss < least:
            best, least = scale, loss
    return best


ALPHAS = tuple(step / 20 for step in range(21))
# Rows of a layer that judge an α, evenly spaced.
JUDGES = 1024
# How far a factor may go: what it moves must stay well inside a 16-bit float.
_LEAST, _MOST = 1e-4, 1e4


def factors(absmax_x: Tensor, absmax_w: Tensor, alpha: float) -> Tensor:
    """(K,) float32 s = max|x|^α / max|w|^(1 − α): inputs are divided by it, weights multiplied.

    absmax_x  (K,) largest |x| of each channel; absmax_w (K,) largest |w| of each over all layers that read it.
    alpha     0 leaves all of the difficulty to the activations, 1 gives it all to the weights.
    A channel that is 0 on either side keeps the factor 1. Raises ValueError for statistics that are not finite and for
    an α outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in 0..1, found {alpha}")
    if absmax_x.shape != absmax_w.shape or absmax_x.dim() != 1:
        raise ValueError(f"one range a channel on both sides, found {list(absmax_x.shape)}, {list(absmax_w.shape)}")
    if not bool((torch.isfinite(absmax_x) & torch.isfinite(absmax_w)).all()):
        raise ValueError("channel ranges must be finite, found NaN or infinity")
    live = (absmax_x > 0) & (absmax_w > 0)
    x, w = torch.where(live, absmax_x.float(), 1.0), torch.where(live, absmax_w.float(), 1.0)
    return torch.where(live, (alpha * x.log() - (1 - alpha) * w.log()).exp().clamp(_LEAST, _MOST), 1.0)


def weight_absmax(weights: Sequence[Tensor]) -> Tensor:
    """(K,) largest |w| of each input channel over all layers that read it."""
    return torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0).float()


def search_alpha(
    weights: Sequence[Tensor],
    rows: Tensor,
    absmax_x: Tensor,
    activation: Literal["int8-token", "int8-tensor"],
    dtype: torch.dtype,
    *,
    tie: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The factor (K,) float32 of the α whose W8A8 outputs are nearest to the float ones; 1 where none is better.

    The error is Σ over layers of ‖X̂ Ŵᵀ − X Wᵀ‖² / ‖X Wᵀ‖²: a layer with large outputs does not drown the others.
    weights     (N, K) float32 each: all layers that read the channels and are to be rounded.
    rows        (T, K) float32: inputs as calibration saw them.
    absmax_x    (K,): largest |x| per channel over all of the calibration text, of which `rows` are a part.
    activation  "int8-token", or "int8-tensor": static, the range being the largest channel's.
    dtype       what the weights' scales are stored in.
    tie         makes channels that must share a factor equal (`folding.share` by "max").
    At most JUDGES outputs of each layer, evenly spaced, judge.
    """
    if rows.dim() != 2 or not len(rows) or not bool(torch.isfinite(rows).all()):
        raise ValueError("smoothing is judged on finite input rows, found none or NaN or infinity among them")
    tie = tie or (lambda statistic: statistic)
    range_x, range_w = tie(absmax_x), tie(weight_absmax(weights))
    counts = [min(len(weight), JUDGES) for weight in weights]
    kept = [w[torch.arange(count) * len(w) // count] for w, count in zip(weights, counts, strict=True)]
    exact = [rows @ weight.T for weight in kept]

    def loss(factor: Tensor) -> float:
        smooth = rows / factor
        if activation == "int8-tensor":
            rounded = round_tensor(smooth, input_scale((absmax_x / factor).max()))
        else:
            rounded = round_tokens(smooth)
        total = 0.0
        for weight, y in zip(kept, exact, strict=True):
            packed = int8.pack(weight * factor, scale_dtype=dtype)
            error = torch.linalg.vector_norm(rounded @ dequantize(packed).T - y, dtype=torch.float64)
            norm = torch.linalg.vector_norm(y, dtype=torch.float64)
            total += float((error / norm) ** 2) if norm > 0 else 0.0
        return total

    best = torch.ones_like(range_x, dtype=torch.float32)
    least = loss(best)
    for alpha in ALPHAS:
        factor = factors(range_x, range_w, alpha)
        judged = loss(factor)
        if judged < least:
            best, least = factor, judged
    return best
