"""GPTQ: codes that make up for each other's rounding, given the second moments of a layer's inputs (2210.17323).

The rounding error of a layer's output is tr(E H Eᵀ), with E = W − Ŵ and H the mean of x xᵀ. With H = M D Mᵀ, M unit
upper triangular, it is Σ_j D_jj ‖(E M)_j‖², and (E M)_j = w_j + Σ_{i<j} e_i M_ij − ŵ_j: so each column in turn is the
rounding of its weight plus what the columns before it left. That is GPTQ's rule without the inverse of H (QuIP,
2307.13304, shows that both are one): one factorisation instead of three. `refine` then goes over the codes again.

In the code      columns (K, N) = Wᵀ, one input's weights in a row; error = Eᵀ, likewise
                 factor = M, unit upper triangular; spreads = D, its diagonal
                 turns = the paper's perm: the inputs in the order in which they are rounded; None: as they are
                 targets = W plus the error that the columns before have left, what rounding starts from
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.grid import Grid, expect_finite, fit_groups, limits, to_packed
from compress.quantize.refine import BLOCK, STRIP, State, refine, spans
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import group_width

# Weights that are fitted at once: what a core's cache holds.
_CHUNK = 1 << 17
# H's diagonal is raised by this much of its mean at most; rounding to nearest has then all but won.
_MOST_DAMPING = 10.0


@dataclass(frozen=True)
class Rounded:
    """A layer's codes and what they cost.

    packed   the layer.
    error    relative error of the layer's output on the calibration inputs, sqrt(tr(E H Eᵀ) / tr(W H Wᵀ)).
    damping  what was added to H's diagonal, over the diagonal's mean; more than was asked where H needed it.
    """

    packed: PackedWeight
    error: float
    damping: float


def quantize_together(
    weights: Sequence[Tensor],
    hessian: Tensor,
    grid: Grid,
    dtype: torch.dtype,
    order: bool = False,
    damping: float = 0.01,
    search: bool = True,
    passes: int = 2,
) -> list[Rounded]:
    """Codes of layers that read the same inputs, (N, K) each; H is factored once, and every layer is as if alone.

    hessian  (K, K) float32, symmetric: the mean of x xᵀ. It is only read.
    dtype    what scales are stored in; codes are chosen against the rounded scales.
    order    inputs of large second moment first. Groups stay those of the input order, so nothing is permuted on disk
             (compressed-tensors' "weight" and "static" order), and their scales come from the weights as they were;
             otherwise from the weights when their turn has come, what the others left included.
    damping  is raised tenfold until H can be factored.
    search   looks for the scale of least squared error in each group, counted by H's diagonal (see `grid.fit`).
    passes   of coordinate descent over scales and codes afterwards; 0: GPTQ as published.

    An input that was always 0 has no say: its weights are rounded to nearest. Memory beyond weights and H: two K × K
    float32, 13 bytes a weight, and `refine`'s 16 for each weight of one group.
    Raises ValueError for values that are not finite, shapes that do not fit, groups that do not divide K, scales that
    overflow `dtype`, or an H that is not a Gram matrix.
    """
    k = hessian.shape[0]
    if hessian.shape != (k, k) or any(weight.ndim != 2 or weight.shape[1] != k for weight in weights):
        raise ValueError(f"weights {[list(w.shape) for w in weights]} do not fit a Hessian {list(hessian.shape)}")
    width = group_width(k, grid.group_size)
    for name, tensor in (*(("the weight", weight) for weight in weights), ("the Hessian", hessian)):
        expect_finite(name, tensor)
    columns = torch.cat([weight.float().T for weight in weights], dim=1)
    turns = hessian.diagonal().argsort(descending=True, stable=True) if order else None
    factor, spreads, ridge = factorize(hessian, turns, damping)
    state = _feed_back(columns, factor, spreads, hessian.diagonal() + ridge, turns, width, grid, dtype, search)
    del factor
    for _ in range(passes):
        refine(state, hessian, ridge, grid, dtype)
    output = output_energy(columns, hessian)
    lost = (state.loss - ridge * torch.linalg.vector_norm(state.error, dim=0).double().square()).clamp(min=0)
    sizes = [len(weight) for weight in weights]
    return [
        Rounded(
            to_packed(codes.T.contiguous(), scale.T.contiguous(), zero.T.contiguous(), grid),
            math.sqrt(float(lost.sum()) / whole) if (whole := float(output.sum())) > 0 else 0.0,
            ridge / (float(hessian.diagonal().mean()) or 1.0),
        )
        for codes, scale, zero, lost, output in zip(
            *(t.split(sizes, dim=-1) for t in (state.codes, state.scale, state.zero, lost, output)), strict=True
        )
    ]


def output_energy(columns: Tensor, hessian: Tensor) -> Tensor:
    """(N,) float64: w H wᵀ of each output, for weights (K, N) float32 and symmetric H (K, K), of which half is read."""
    energy = torch.zeros(columns.shape[1], dtype=torch.float64)
    for first, last in spans(0, len(columns), 4 * BLOCK):
        here = columns[first:last]
        energy += (hessian[first:last, first:last] @ here).mul_(here).sum(dim=0)
        if last < len(columns):
            energy += 2 * (hessian[first:last, last:] @ columns[last:]).mul_(here).sum(dim=0)
    return energy


def factorize(hessian: Tensor, turns: Tensor | None, damping: float) -> tuple[Tensor, Tensor, float]:
    """M (K, K) unit upper triangular and D (K,) with H + r = M D Mᵀ, and r, what the diagonal was raised by.

    Rows and columns stand in the order `turns` (None: as they are). r is `damping` times the diagonal's mean, or ten
    times as much, and so on, until float32 can factor it. Raises ValueError where 10 times the mean is not enough: the
    mean of x xᵀ it cannot be.
    """
    mean = float(hessian.diagonal().mean()) or 1.0
    backwards = torch.arange(len(hessian) - 1, -1, -1) if turns is None else turns.flip(0)
    while True:
        # Cholesky's factor is lower triangular. Turned around at both ends the upper one is.
        turned = hessian[backwards.unsqueeze(1), backwards]
        turned.diagonal().add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(turned)
        del turned
        diagonal = lower.diagonal().clone()
        if int(info) == 0 and bool((torch.isfinite(diagonal) & (diagonal > 0)).all()):
            return lower.div_(diagonal).flip(0, 1), diagonal.square().flip(0), damping * mean
        if damping >= _MOST_DAMPING:
            raise ValueError(f"the Hessian is not a Gram matrix: {damping:g} times its mean diagonal did not mend it")
        damping = max(damping * 10, 1e-6)


def _feed_back(
    columns: Tensor,
    factor: Tensor,
    spreads: Tensor,
    importance: Tensor,
    turns: Tensor | None,
    width: int,
    grid: Grid,
    dtype: torch.dtype,
    search: bool,
) -> State:
    """GPTQ's pass over the inputs in the order `turns`; groups of `width` are those of `columns` (K, N).

    Without `turns` a group's scales are fitted to the weights with the errors before them, else to those as they were.
    """
    k, n = columns.shape
    scale, zero = torch.empty(k // width, n), torch.empty(k // width, n)
    if turns is None:
        ordered, group_of, reach = columns, torch.arange(k) // width, width
    else:
        ordered, group_of, reach = columns[turns], turns // width, BLOCK
        for group, (start, stop) in enumerate(spans(0, k, width)):
            _fit(columns[start:stop], importance[start:stop], grid, dtype, search, scale[group], zero[group])
    error, codes = torch.empty_like(columns), torch.empty(k, n, dtype=torch.int8)
    loss = torch.zeros(n, dtype=torch.float64)
    for start, stop in spans(0, k, reach):
        # What all earlier columns have left, in one product.
        targets = torch.addmm(ordered[start:stop], factor[:start, start:stop].T, error[:start])
        if turns is None:
            group = start // width
            weights = targets
            if start:
                # The first target counts on the group's other weights to stay. What they are fitted as is where all
                # of them would go together to make up for the columns before.
                corner, moved = factor[start:stop, start:stop].T, targets - ordered[start:stop]
                weights = torch.linalg.solve_triangular(corner, moved, upper=False, unitriangular=True)
                weights += ordered[start:stop]
            _fit(weights, importance[start:stop], grid, dtype, search, scale[group], zero[group])
        for first, last in spans(start, stop, BLOCK):
            block = targets[first - start : last - start]
            if first > start:
                block.addmm_(factor[start:first, first:last].T, error[start:first])
            groups = group_of[first:last]
            steps = _in_turn(
                ordered[first:last],
                block,
                factor[first:last, first:last],
                groups.tolist(),
                scale,
                zero,
                grid,
                error[first:last],
            )
            codes[first:last] = steps.add_(zero[groups])
            # What rounding itself lost of each target: (E M)_j.
            rounding = block.sub_(ordered[first:last]).add_(error[first:last])
            loss += rounding.square_().mul_(spreads[first:last].unsqueeze(1)).sum(dim=0)
    if turns is not None:
        back = turns.argsort()
        error, codes = error[back], codes[back]
    return State(columns, error, codes, scale, zero, loss)


def _in_turn(
    weights: Tensor,
    targets: Tensor,
    corner: Tensor,
    groups: list[int],
    scale: Tensor,
    zero: Tensor,
    grid: Grid,
    error: Tensor,
) -> Tensor:
    """Rounds the columns of a block one after the other: codes less their zeros (B, N), with `error` (B, N) written.

    targets  (B, N): `weights` plus what the columns before the block left; what those within it leave is added.
    corner   (B, B) of the factor; `groups` are the columns' rows in scale and zero (G, N).
    """
    known = {group: (scale[group], *limits(zero[group], grid)) for group in set(groups)}
    steps = torch.empty_like(targets)
    for first, last in spans(0, len(weights), STRIP):
        if first:
            targets[first:last].addmm_(corner[:first, first:last].T, error[:first])
        before = corner[first:last, first:last].T.contiguous()
        for column in range(first, last):
            target, (step, low, high) = targets[column], known[groups[column]]
            if column > first:
                target.addmv_(error[first:column].T, before[column - first, : column - first])
            torch.div(target, step, out=steps[column])
            steps[column].round_().clamp_(low, high)
            torch.addcmul(weights[column], steps[column], step, value=-1, out=error[column])
    return steps


def _fit(
    values: Tensor, importance: Tensor, grid: Grid, dtype: torch.dtype, search: bool, scale: Tensor, zero: Tensor
) -> None:
    """Scale and zero (N,) of one group's weights (B, N), written in place."""
    for first, last in spans(0, values.shape[1], max(1, _CHUNK // len(values))):
        part = values[:, first:last].contiguous()
        scale[first:last], zero[first:last] = fit_groups(part, grid, dtype, importance.unsqueeze(1), search)
