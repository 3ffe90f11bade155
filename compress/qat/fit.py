"""Codes of a few values fitted to a layer's inputs: error feedback over groups of inputs, then coordinate descent.

A group of w inputs takes one pattern of a table (P, w): ternary has three patterns of one input, ternary-1.25 has 32 of
four. With E = W − Ŵ and H the mean of x xᵀ the output's error is tr(E H Eᵀ). H + r = M D Mᵀ, M unit upper triangular,
makes it Σ_j D_jj ‖(E M)_j‖², so that groups can be decided in turn, each making up for those before it (LDLQ,
2307.13304, which shows that this is GPTQ); within a group all patterns are tried. Afterwards each group is decided
again, given all the others, and scales are those of least error for the codes.

In the code      error = E; factor = M, spreads = D (`compress.quantize.gptq.factorize`)
                 targets = W + E (M − 1), what a group is rounded from
                 pull = E H, half of the error's gradient by E
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.quantize.gptq import factorize
from compress.quantize.refine import spans

# Inputs whose errors reach the others at once, in one product.
_BLOCK = 128
# Error feedback is done again once the scales fit its codes.
_FEEDBACKS = 2


@dataclass(frozen=True)
class Fitted:
    """What a weight (N, K) float32 becomes.

    codes   (N, K) int8.
    scale   (N, 1) or (1, 1) float32, not yet as a file holds it.
    wanted  (N, K) float32: where each weight had best been, the others as they are; ŵ + (E H)_j / H_jj.
    """

    codes: Tensor
    scale: Tensor
    wanted: Tensor


@torch.no_grad()
def fit(
    weight: Tensor, hessian: Tensor, table: Tensor, *, per_row: bool, damping: float = 0.01, passes: int = 2
) -> Fitted:
    """Codes of least output error that were found for a weight (N, K) of any float dtype.

    hessian  (K, K) float32, symmetric: the mean of x xᵀ.
    table    (P, w) int8: the patterns of w codes. Where w does not divide K, codes beyond the end mean nothing; a
             pattern that has a 0 within a shortened group is then not taken.
    per_row  whether each output has its scale; otherwise the weight has one.
    damping  of H's diagonal, in shares of its mean (`factorize`).
    passes   of coordinate descent.

    A row without weights (or a weight that is 0 altogether) has the scale 0. Raises ValueError as `factorize` does.
    """
    k, width = weight.shape[1], table.shape[1]
    short = -k % width
    factor, spreads, ridge = factorize(hessian, None, damping)
    damped = hessian.clone()
    damped.diagonal().add_(ridge)
    # Inputs beyond the end are always 0, and cost nothing.
    weight, spreads = F.pad(weight.float(), (0, short)), F.pad(spreads, (0, short))
    damped, factor = F.pad(damped, (0, short, 0, short)), F.pad(factor, (0, short, 0, short))
    factor.diagonal().fill_(1.0)
    patterns, dim = table.to(weight.device, torch.float32), 1 if per_row else (0, 1)
    scale = weight[:, :k].abs().mean(dim, keepdim=True)
    for _ in range(_FEEDBACKS):
        codes = _in_turn(weight, factor, spreads, patterns, scale, k)
        scale = _least(weight, codes, damped, dim)
    for _ in range(passes):
        codes = _descend(weight, codes, damped, patterns, scale, k)
        scale = _least(weight, codes, damped, dim)
    rounded = codes * scale
    curvature = damped.diagonal().clamp(min=torch.finfo(torch.float32).tiny)
    wanted = rounded + (weight - rounded) @ damped / curvature
    return Fitted(codes[:, :k].to(torch.int8), scale, wanted[:, :k].contiguous())


def _in_turn(weight: Tensor, factor: Tensor, spreads: Tensor, patterns: Tensor, scale: Tensor, k: int) -> Tensor:
    """Codes (N, K) float32 by error feedback; scale (N, 1) or (1, 1), `k` inputs that there are."""
    error, codes = torch.empty_like(weight), torch.empty_like(weight)
    width = patterns.shape[1]
    for start, stop in spans(0, weight.shape[1], _BLOCK):
        targets = torch.addmm(weight[:, start:stop], error[:, :start], factor[:start, start:stop])
        for first in range(start, stop, width):
            group, here = slice(first, first + width), slice(first - start, first - start + width)
            corner = factor[group, group]
            # (E M)_j of the group is aim − scale · pattern M.
            aim = targets[:, here] + weight[:, group] @ (corner - torch.eye(width, device=corner.device))
            reach = patterns @ corner
            cost = scale.square() * (reach.square() @ spreads[group])
            cost = torch.addmm(cost.expand(len(weight), -1), scale * aim * spreads[group], reach.T, alpha=-2)
            codes[:, group] = patterns[_allowed(cost, patterns, k - first).argmin(1)]
            torch.sub(weight[:, group], codes[:, group] * scale, out=error[:, group])
            targets[:, here.stop :].addmm_(error[:, group], factor[group, first + width : stop])
    return codes


def _descend(weight: Tensor, codes: Tensor, hessian: Tensor, patterns: Tensor, scale: Tensor, k: int) -> Tensor:
    """Codes (N, K) float32, each group's the best one given the others, which are as they were or decided again."""
    codes, width = codes.clone(), patterns.shape[1]
    pull = (weight - codes * scale) @ hessian
    for start, stop in spans(0, weight.shape[1], _BLOCK):
        before = codes[:, start:stop].clone()
        for first in range(start, stop, width):
            group = slice(first, first + width)
            corner, now = hessian[group, group], codes[:, group].clone()
            aim = pull[:, group] + (now * scale) @ corner
            cost = scale.square() * ((patterns @ corner) * patterns).sum(1)
            cost = torch.addmm(cost.expand(len(weight), -1), scale * aim, patterns.T, alpha=-2)
            codes[:, group] = patterns[_allowed(cost, patterns, k - first).argmin(1)]
            pull[:, start:stop].addmm_((codes[:, group] - now) * scale, hessian[group, start:stop], alpha=-1)
        moved = (codes[:, start:stop] - before) * scale
        for rest in (slice(0, start), slice(stop, None)):
            pull[:, rest].addmm_(moved, hessian[start:stop, rest], alpha=-1)
    return codes


def _allowed(cost: Tensor, patterns: Tensor, there: int) -> Tensor:
    """Costs (N, P); of a group of which only `there` inputs are there, without patterns that have a 0 among these."""
    if there >= patterns.shape[1]:
        return cost
    return cost.masked_fill((patterns[:, :there] == 0).any(1), torch.inf)


def _least(weight: Tensor, codes: Tensor, hessian: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """Scales of least error for codes (N, K), (N, 1) or (1, 1); 0 where that were a negative one."""
    seen = codes @ hessian
    along, size = ((seen * other).sum(dim, keepdim=True, dtype=torch.float64) for other in (weight, codes))
    return (along / size.clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=0).float()
