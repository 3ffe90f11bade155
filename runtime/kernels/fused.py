"""Sums of products in the one order that all kernels for CPUs have: fused multiply-adds, first to last.

A fused multiply-add rounds once: s ← round(s + a · b) in float32. torch has none on tensors. But the product of two
float32 numbers is exact in float64, so that only the sum is rounded twice, to float64 and then to float32. That gives
another number than one rounding in two rare cases, which are looked for and mended: the float64 sum lies halfway
between two float32 numbers although the exact sum does not, or it is so small that float32 holds fewer bits of it.
native/fused.h does the same, and processors have an instruction.
"""

import torch
from torch import Tensor

# The 29 bits of a float64 that a float32 has not, and what they are halfway between two float32 numbers.
_BELOW, _HALFWAY = 0x1FFFFFFF, 0x10000000
# The least normal float32 number.
_LEAST = 2.0**-126
# Sums that are checked together, and that one step makes: both fit a core's cache.
_AT_ONCE, _STEP = 1 << 17, 1 << 16


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, K) times weight (K, N), float32: (T, N), every number Σ_k x[k] · w[k] as `fused_sum` has it."""
    left, right = x.t().unsqueeze(2), weight.unsqueeze(1)
    rows = max(1, _STEP // max(1, weight.shape[1]))
    return torch.cat([fused_sum(part, right) for part in left.split(rows, dim=1)])


def fused_sum(left: Tensor, right: Tensor) -> Tensor:
    """Σ_k left[k] · right[k], float32, by fused multiply-adds from k = 0 on, starting with 0.

    left, right  (K, …) float32, with as many dimensions; those after the first are broadcast.
    """
    steps, shape = left.shape[0], torch.broadcast_shapes(left.shape[1:], right.shape[1:])
    # The sum so far, which is a float32 number, in both types.
    rounded = torch.zeros(shape, dtype=torch.float32, device=left.device)
    total = rounded.double()
    if not total.numel():
        return rounded
    left = left.double()
    count, done = max(1, _AT_ONCE // total.numel()), 0
    while done < steps:
        end = min(done + count, steps)
        made, start = left[done:end] * right[done:end], rounded
        for term in made.unbind(0):
            rounded = term.add_(total).float()
            total = rounded.double()
        wrong = _twice_rounded(made, start, left[done:end], right[done:end])
        if wrong is None:
            done = end
            continue
        # Rare: goes on after the first step that had to be mended.
        step, at, values = wrong
        rounded = made[step].float()
        rounded[at] = values
        total = rounded.double()
        done += step + 1
    return rounded


def _twice_rounded(
    made: Tensor, start: Tensor, left: Tensor, right: Tensor
) -> tuple[int, tuple[Tensor, ...], Tensor] | None:
    """The first step whose float64 sums do not round to the right float32 numbers; where in it, and those numbers.

    made   (n, …) float64 sums of n steps. start (…) float32: the sum before them. left, right: see `fused_sum`.
    """
    suspect = (made.view(torch.int64).bitwise_and(_BELOW) == _HALFWAY).logical_or_(made.abs() <= _LEAST)
    if not suspect.any():
        return None
    places = suspect.logical_and_(made != 0).nonzero(as_tuple=True)
    step, at = places[0], places[1:]
    found = made[places]
    before = torch.where(step > 0, made[(step - 1, *at)].float(), start[at]).double()
    term = left.expand(made.shape)[places] * right.expand(made.shape)[places]
    # What was cut off in float64 (Knuth's TwoSum). Beside infinities it is NaN, which is neither below nor above 0.
    part = found - term
    rest = (term - (found - part)) + (before - part)
    # A last bit that says that something was cut off makes the second rounding right (round to odd).
    odd = torch.nextafter(found, torch.where(rest > 0, torch.inf, -torch.inf).double())
    even = found.view(torch.int64) % 2 == 0
    mended = torch.where(((rest < 0) | (rest > 0)) & even, odd, found).float()
    wrong = mended != found.float()
    wrong &= ~mended.isnan()
    if not wrong.any():
        return None
    first = int(step[wrong].min())
    wrong &= step == first
    return first, tuple(place[wrong] for place in at), mended[wrong]
