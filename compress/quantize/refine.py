"""Coordinate descent on a layer's output error: every scale and every code in turn takes the value that suits the rest.

With E = W − Ŵ the error is tr(E H Eᵀ). It is a parabola in each group's scale and in each weight's value, so the best
scale and the best code are known in closed form given all others, and no step makes the error larger (QuantEase,
2309.01885, for the codes). GPTQ fixes a column before it has seen the later ones; this is what lets it think again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.grid import Grid, limits
from runtime.formats.tensors import round_scale

# Columns whose changes reach the later ones in one matrix product. Within a block strips of them do, and only within a
# strip one column at a time: what that reads again for each column stays in a core's cache.
BLOCK = 128
STRIP = 16


@dataclass(frozen=True)
class State:
    """A layer under way, inputs first so that one input's weights lie together; its tensors are changed in place.

    columns  (K, N) float32: the weight to be approximated, transposed; never changed.
    error    (K, N) float32: `columns` minus what the codes are read back as.
    codes    (K, N) int8.
    scale    (G, N) float32, and `zero` (G, N): group g is inputs g · K / G and on.
    loss     (N,) float64: each output's part of tr(E (H + ridge) Eᵀ), carried along by whoever changes the rest.
    """

    columns: Tensor
    error: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    loss: Tensor

    @property
    def width(self) -> int:
        """Inputs in a group."""
        return len(self.columns) // len(self.scale)


def spans(start: int, stop: int, width: int) -> list[tuple[int, int]]:
    """start..stop in pieces of `width`; the last may be narrower."""
    return [(first, min(first + width, stop)) for first in range(start, stop, width)]


def refine(state: State, hessian: Tensor, ridge: float, grid: Grid, dtype: torch.dtype) -> None:
    """One pass over all groups in their order: the scale, then each input's codes.

    hessian  (K, K) float32, symmetric, in the order of `state`; `ridge` is added to its diagonal, so that inputs that
             hardly occur are still rounded to near where they were. Either it or every diagonal element is positive.
    dtype    what scales are stored in: they are rounded to it, and kept where that would make the error larger.
    Memory: 16 bytes for each weight of a group.
    """
    diagonal = (hessian.diagonal() + ridge).tolist()
    for number, (start, stop) in enumerate(spans(0, len(state.columns), state.width)):
        slope = torch.addmm(state.error[start:stop], hessian[start:stop], state.error, beta=ridge)
        _refit(state, number, hessian[start:stop, start:stop], ridge, slope, dtype)
        moved = torch.empty_like(slope)
        for first, last in spans(start, stop, BLOCK):
            here = slice(first - start, last - start)
            if first > start:
                slope[here].addmm_(hessian[first:last, start:first], moved[: first - start])
            _descend(state, number, hessian, diagonal, (first, last), slope[here], moved[here], grid)


def _refit(state: State, number: int, corner: Tensor, ridge: float, slope: Tensor, dtype: torch.dtype) -> None:
    """The scale of a group of which least error follows; `slope` (B, N) is (H E)'s part, and is kept up to date."""
    group = slice(number * state.width, (number + 1) * state.width)
    values = state.codes[group].float().sub_(state.zero[number])
    curve = torch.addmm(values, corner, values, beta=ridge)
    products, squares = (values * slope).sum(dim=0), (values * curve).sum(dim=0)
    scale = state.scale[number]
    best = scale + products / squares
    usable = (squares > 0) & (best * scale > 0)
    change = torch.where(usable, round_scale(torch.where(usable, best, scale), dtype), scale) - scale
    # What the change takes off the error. Rounding may have carried it too far.
    change = torch.where(change * (2 * products - change * squares) > 0, change, 0)
    state.loss.sub_(change * (2 * products - change * squares))
    scale += change
    state.error[group].addcmul_(values, change, value=-1)
    slope.addcmul_(curve, change, value=-1)


def _descend(
    state: State,
    number: int,
    hessian: Tensor,
    diagonal: list[float],
    span: tuple[int, int],
    slope: Tensor,
    moved: Tensor,
    grid: Grid,
) -> None:
    """The codes of the inputs `span`, one input after the other; `moved` (B, N) becomes the change of their error."""
    first, last = span
    scale, (low, high) = state.scale[number], limits(state.zero[number], grid)
    # Counted in steps of the scale a column's change is of whole numbers, and its target is the code it has, moved.
    slope.div_(scale)
    old = state.codes[first:last].float().sub_(state.zero[number])
    new = torch.empty_like(old)
    for top, bottom in spans(0, last - first, STRIP):
        if top:
            slope[top:bottom].addmm_(hessian[first + top : first + bottom, first : first + top], moved[:top])
        for row in range(top, bottom):
            if row > top:
                slope[row].addmv_(moved[top:row].T, hessian[first + row, first + top : first + row])
            torch.add(old[row], slope[row], alpha=1 / diagonal[first + row], out=new[row])
            new[row].round_().clamp_(low, high)
            torch.sub(old[row], new[row], out=moved[row])
    # In its turn each input's slope was what it was under all changes before.
    curve = torch.tensor(diagonal[first:last]).unsqueeze(1)
    state.loss.add_((moved * curve).add_(slope, alpha=2).mul_(moved).sum(dim=0).mul_(scale.square()))
    moved.mul_(scale)
    torch.addcmul(state.columns[first:last], new, scale, value=-1, out=state.error[first:last])
    state.codes[first:last] = new.add_(state.zero[number])
