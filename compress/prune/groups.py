"""Whole groups of a linear layer's inputs: which can go, and what the others become by least squares.

A group is one channel of an MLP, or all columns of o_proj that one key/value head feeds.
"""

import torch
from torch import Tensor

from compress.prune import hessian as hessians

# Rounds in which groups are removed: after each one the rest is scored again, because two groups that say the same
# are both cheap until one of them is gone.
_ROUNDS = 32


def choose(weight: Tensor, hessian: Tensor, size: int, keep: int, damping: float = 0.01) -> Tensor:
    """(keep,) int64, ascending: the groups to keep, K / size of them being there, removing the cheapest by and by.

    weight   (N, K), any float dtype: the layer whose inputs are removed; hessian (K, K), the mean of x xᵀ.
    size     adjacent inputs in a group.
    A group S costs tr(W_S (P_SS)⁻¹ W_Sᵀ) with P the damped Hessian's inverse: the squared output error that is left
    when the other inputs are refitted (optimal brain surgeon by groups, as in ZipLM: 2302.04089).
    Raises ValueError for sizes that do not fit, and as `hessian.check` says.
    """
    inputs = weight.shape[1]
    if inputs % size or not 0 < keep <= inputs // size:
        raise ValueError(f"cannot keep {keep} groups of {size} out of {inputs} inputs")
    hessians.check(hessian, inputs)
    alive = torch.arange(inputs // size)
    if keep == len(alive):
        return alive
    inverse = torch.cholesky_inverse(hessians.cholesky(hessian, damping)[0])
    columns = weight.float().T.clone(memory_format=torch.contiguous_format)
    batch = -(-(len(alive) - keep) // _ROUNDS)
    while len(alive) > keep:
        count = min(batch, len(alive) - keep)
        # A stable sort: of equal groups the first go, whatever the machine.
        order = _costs(columns, inverse, alive, size).argsort(stable=True)
        gone, alive = alive[order[:count]], alive[order[count:].sort().values]
        _remove(columns, inverse, members(gone, size))
    return alive


def members(groups: Tensor, size: int) -> Tensor:
    """The inputs of groups of `size` adjacent ones."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def refit(weight: Tensor, hessian: Tensor, kept: Tensor, damping: float = 0.01) -> tuple[Tensor, float]:
    """W H[:, kept] (H[kept, kept])⁻¹, (N, kept) float32: the weight whose output from the kept inputs is nearest to the
    whole one's, and the damping that it took, which draws it towards the weight as it was.

    Raises ValueError as `hessian.check` says.
    """
    hessians.check(hessian, weight.shape[1])
    wide = weight.float()
    among = hessian[kept][:, kept].float()
    factor, used = hessians.cholesky(among, damping)
    wanted = hessian[kept].float() @ wide.T + hessians.ridge(among, used) * wide[:, kept].T
    return torch.cholesky_solve(wanted, factor).T.contiguous(), used


def removal_error(weight: Tensor, hessian: Tensor, kept: Tensor, now: Tensor) -> float:
    """Relative output error of `now` (N, kept) in place of the weight (N, K)."""
    spread = torch.zeros(weight.shape).index_copy_(1, kept, now.float())
    return hessians.output_error(weight, spread, hessian)


def _costs(columns: Tensor, inverse: Tensor, alive: Tensor, size: int) -> Tensor:
    if size == 1:
        return columns[alive].square().sum(1) / inverse.diagonal()[alive].clamp_min(torch.finfo(torch.float32).tiny)
    found = []
    for group in alive.tolist():
        here = slice(group * size, (group + 1) * size)
        lower = torch.linalg.cholesky(inverse[here, here])
        found.append(torch.linalg.solve_triangular(lower, columns[here], upper=False).square().sum())
    return torch.stack(found)


def _remove(columns: Tensor, inverse: Tensor, gone: Tensor) -> None:
    """Refits the columns (K, N) and the inverse (K, K) to the inputs that are left, in place."""
    rows = inverse[gone]
    lower = torch.linalg.cholesky(rows[:, gone])
    half = torch.linalg.solve_triangular(lower, rows, upper=False)
    inverse.addmm_(half.T, half, alpha=-1)
    columns.addmm_(half.T, torch.linalg.solve_triangular(lower, columns[gone], upper=False), alpha=-1)
