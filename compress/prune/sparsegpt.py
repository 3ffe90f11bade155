"""SparseGPT: weights are removed column by column, and those still to come make up for it (2301.00774).

Everything runs on the transposed weight, so that a column of inputs is one contiguous row of memory.
"""

from itertools import combinations

import torch
from torch import Tensor

from compress.prune.masks import Sparsity, check, finite, smallest


def check_hessian(hessian: Tensor, inputs: int) -> None:
    """Raises ValueError unless the Hessian is (inputs, inputs), finite, with no negative diagonal."""
    if tuple(hessian.shape) != (inputs, inputs):
        raise ValueError(f"expected a Hessian of {inputs} inputs, found the shape {tuple(hessian.shape)}")
    if not finite(hessian):
        raise ValueError("the Hessian holds NaN or Inf")
    if (hessian.diagonal() < 0).any():
        raise ValueError("the Hessian has a negative diagonal, so it is no mean of x xᵀ")


def ridge(hessian: Tensor, damping: float) -> float:
    """λ = damping · mean(diag H); 1 without any activation at all, where every weight then counts the same."""
    mean = float(hessian.diagonal().mean(dtype=torch.float64))
    return damping * mean if mean > 0 else 1.0


def cholesky(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """The lower factor of H + λ·I, float32, and the damping that it took (λ: see `ridge`).

    Damping grows tenfold (from 1e-4 where it was 0) until the factor exists. A dead channel needs no case of its own:
    it is coupled to nothing, and λ makes it the cheapest to lose.
    Raises ValueError for a negative damping, and where a damping of 1 is still too little.
    """
    if damping < 0:
        raise ValueError(f"expected a damping of at least 0, found {damping}")
    while damping <= 1:
        damped = hessian.float().clone()
        damped.diagonal().add_(ridge(hessian, damping))
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and torch.isfinite(factor.diagonal()).all():
            return factor, damping
        damping = max(10 * damping, 1e-4)
    raise ValueError("the Hessian has no Cholesky factor even at a damping of 1: it is no mean of x xᵀ")


# Columns whose mask is chosen together, and those that are updated one by one before a product updates the rest.
_BLOCK = 128
_STEP = 16
# Subsets of a group that are compared: 6 for 2:4, 70 for 4:8.
_MOST_SUBSETS = 70


def prune(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damping: float = 0.01) -> Tensor:
    """(N, K) float32: weights removed, exactly 0, and the others refitted to the layer's inputs.

    weight   (N, K), any float dtype; hessian (K, K), the mean of x xᵀ over the calibration tokens.
    A share is exact in each block of 128 columns, all rows together; a pattern in every group of m of every row. The
    members of a group are removed together, those that cost least together: the paper scores each alone.
    damping  of the Hessian's mean diagonal, added to its diagonal; grows where that is not enough.
    Raises ValueError as `masks.check` and `check_hessian` say, and for a pattern with more than 70 subsets.
    """
    check(weight, sparsity)
    check_hessian(hessian, weight.shape[1])
    block = _BLOCK
    if isinstance(sparsity, tuple):
        if len(_subsets(*sparsity)) > _MOST_SUBSETS:
            raise ValueError(f"expected a pattern with at most {_MOST_SUBSETS} subsets, as 4:8, found {sparsity}")
        block -= _BLOCK % sparsity[1]
    # The upper R with R Rᵀ = H + λ·I. R⁻¹ is the upper factor of (H + λ·I)⁻¹, so that going through the columns in
    # order needs no inverse of H. Cholesky's factor is lower triangular; turned around at both ends an upper one is.
    factor = cholesky(hessian.flip(0, 1), damping)[0].flip(0, 1)
    columns = weight.float().T.clone(memory_format=torch.contiguous_format)
    removed = torch.empty_like(columns)
    for first in range(0, len(columns), block):
        done, here = slice(0, first), slice(first, first + block)
        among = factor[here, here]
        inverse = torch.linalg.solve_triangular(among, torch.eye(len(among)), upper=True)
        # ‖E R‖² is least where (E R) is 0 in this block: what the paper gets from the inverse Hessian's rows, which
        # therefore only the block itself needs.
        columns[here].addmm_((factor[done, here] @ inverse).T, removed[done])
        _prune_block(columns[here], inverse, sparsity)
        removed[here] = weight[:, here].float().T - columns[here]
    return columns.T.contiguous()


def _prune_block(columns: Tensor, factor: Tensor, sparsity: Sparsity) -> None:
    """Prunes columns (B, N) in place.

    factor  (B, B), the block on the diagonal of U, the inverse Hessian's upper factor.
    """
    # w / U_ii where a weight is removed, else 0.
    errors = torch.empty_like(columns)
    diagonal = factor.diagonal().tolist()
    pattern = isinstance(sparsity, tuple)
    if isinstance(sparsity, tuple):
        of, subsets = sparsity[1], _subsets(*sparsity)
        costs = _subset_costs(factor, of, subsets)
        members = torch.zeros(len(subsets), of, dtype=torch.bool).scatter_(1, torch.tensor(subsets), True)
        step, removed = of * -(-_STEP // of), torch.empty(columns.shape, dtype=torch.bool)
    else:
        scores = (columns / factor.diagonal()[:, None]).square_()
        step, removed = _STEP, smallest(scores.flatten(), round(sparsity * columns.numel())).view_as(columns)
    for begin in range(0, len(columns), step):
        end = min(begin + step, len(columns))
        for i in range(begin, end):
            if pattern and i % of == 0:
                losses = (costs[i // of] @ columns[i : i + of]).square_().view(len(subsets), -1, columns.shape[1])
                removed[i : i + of] = members[losses.sum(1).argmin(0)].T
            column = columns[i]
            torch.mul(column, removed[i], out=errors[i]).div_(diagonal[i])
            column.masked_fill_(removed[i], 0)
            columns[i + 1 : end].addr_(factor[i, i + 1 : end], errors[i], alpha=-1)
        columns[end:].addmm_(factor[begin:end, end:].T, errors[begin:end], alpha=-1)


def _subsets(kept: int, of: int) -> list[tuple[int, ...]]:
    """What can be removed of a group of `of`, all but `kept`."""
    return list(combinations(range(of), of - kept))


def _subset_costs(factor: Tensor, of: int, subsets: list[tuple[int, ...]]) -> Tensor:
    """(B / m, subsets · r, m): the squared norm of its r rows times a group's weights is what removing a subset costs.

    For the columns from a group on, the inverse Hessian's block of the group is G = Uᵀ U with its own block U. Removing
    the set S of it and refitting the rest costs w_Sᵀ (G_SS)⁻¹ w_S (optimal brain surgeon, several weights at once).
    """
    groups = torch.stack([factor[i : i + of, i : i + of] for i in range(0, len(factor), of)]).double()
    inverse = groups.mT @ groups
    index = torch.tensor(subsets)
    lower = torch.linalg.cholesky(inverse[:, index[:, :, None], index[:, None, :]])
    removed = index.shape[1]
    halves = torch.linalg.solve_triangular(lower, torch.eye(removed, dtype=torch.float64).expand_as(lower), upper=False)
    spread = torch.zeros(*halves.shape[:3], of, dtype=torch.float64)
    spread.scatter_(3, index[None, :, None, :].expand_as(halves), halves)
    return spread.flatten(1, 2).float()
