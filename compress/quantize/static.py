"""Static int8 activations: one calibrated scale for all inputs of a layer, instead of one measured for each token.

What the kernels make of x is round(x / scale), clipped to ±127.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
