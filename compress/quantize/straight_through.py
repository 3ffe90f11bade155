"""Rounding that gradients pass as if it were not there (the straight-through estimator, Bengio et al. 2013, 1308.3432).

Under bfloat16 autocast none of this loses anything: codes are whole numbers up to 128, which bfloat16 holds.
"""

from typing import Any

import torch
from torch import Tensor

# Largest code of an input.
LIMIT = 127


def blend(value: Tensor, rounded: Tensor, share: float) -> Tensor:
    """value + λ(rounded − value) for the share λ, in `rounded`'s very bits at λ = 1.

    Both of one shape and dtype. The gradient goes to `value` alone, whole, whatever λ is.
    """
    blended: Tensor = _Blend.apply(value, rounded, share)  # type: ignore[no-untyped-call]
    return blended


class _Blend(torch.autograd.Function):
    """A sum with a detached term would do, but for its last bits: w + (q − w) is not q."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor, share: float) -> Tensor:
        # A function must not hand back its input itself.
        return rounded.view_as(rounded) if share == 1 else torch.lerp(value, rounded, share)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0], None, None


def pass_through(value: Tensor, share: float = 1.0) -> Tensor:
    """Whole numbers nearest to `value`, or the `share` of the way there."""
    return blend(value, torch.round(value.detach()), share)


def input_steps(x: Tensor) -> Tensor:
    """(…, 1) float32: absmax / 127 of each row of x (…, K); codes are round(x · (1 / step)), as kernels have it.

    1 for a row of zeros (or of subnormal numbers), whose codes are 0 by any step.
    """
    step = x.detach().float().abs().amax(dim=-1, keepdim=True) / LIMIT
    return torch.where(step >= torch.finfo(torch.float32).tiny, step, 1.0)


def round_inputs(x: Tensor, group_size: int = 0) -> Tensor:
    """(…, K) float32: what kernels make of x, int8 with a step for each token and `group_size` inputs (0: for a token).

    Raises ValueError where groups do not divide K.
    """
    width = group_size or x.shape[-1]
    if x.shape[-1] % width:
        raise ValueError(f"groups of {width} do not divide {x.shape[-1]} inputs")
    grouped = x.float().unflatten(-1, (-1, width))
    step = input_steps(grouped)
    return (pass_through(grouped * (1.0 / step)) * step).flatten(-2)
