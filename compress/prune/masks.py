"""How much is to be zero, and masks that hold exactly that much.

A mask is bool of the weight's shape, True where a weight is kept.
"""

import torch
from torch import Tensor

Sparsity = float | tuple[int, int]
"""A share of the weights to remove, 0 ≤ share < 1, or (n, m): n are kept of every m in a row, as 2:4 is meant."""


def finite(tensor: Tensor) -> bool:
    """Whether all values are: the extremes tell, NaN being both, without a mask of the tensor's size."""
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def check(weight: Tensor, sparsity: Sparsity) -> None:
    """Raises ValueError for a weight that is no finite matrix, a share out of range, or rows not divisible by m."""
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"expected a weight (outputs, inputs), found the shape {tuple(weight.shape)}")
    if not finite(weight):
        raise ValueError("the weight holds NaN or Inf")
    if isinstance(sparsity, tuple):
        kept, of = sparsity
        if not 0 < kept < of:
            raise ValueError(f"expected a pattern n:m with 0 < n < m, found {kept}:{of}")
        if weight.shape[1] % of:
            raise ValueError(f"the pattern {kept}:{of} needs rows of a multiple of {of}, found {weight.shape[1]}")
    elif not 0 <= sparsity < 1:
        raise ValueError(f"expected a share of at least 0 and below 1, found {sparsity}")


def smallest(scores: Tensor, count: int) -> Tensor:
    """bool (…, K): True at exactly the `count` smallest scores of each row; of equal ones the first are taken.

    Raises ValueError for NaN among the scores.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, dim=-1, keepdim=True).values
    below, tied = scores < threshold, scores == threshold
    room = count - below.sum(-1, keepdim=True)
    if torch.equal(tied.sum(-1, keepdim=True), room):
        return below | tied
    if scores.isnan().any():
        raise ValueError("scores hold NaN")
    # Weights in bfloat16 have few distinct values, so ties at the threshold are the rule, not the exception.
    return below | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def keep_largest(scores: Tensor, sparsity: Sparsity) -> Tensor:
    """The mask (N, K) of exactly the asked share of each row, or of n in every m, by scores (N, K)."""
    if isinstance(sparsity, tuple):
        kept, of = sparsity
        groups = scores.reshape(len(scores), -1, of)
        return largest_of_group(groups, kept).reshape(scores.shape)
    return ~smallest(scores, round(sparsity * scores.shape[-1]))


def largest_of_group(scores: Tensor, kept: int) -> Tensor:
    """bool (…, m): the `kept` largest of each group of m; of equal ones the last.

    Groups are small: counting who beats whom takes m² / 2 comparisons of whole slices, far less than sorting each.
    """
    members = scores.unbind(-1)
    rank = torch.zeros(scores.shape, dtype=torch.uint8)
    for later in range(len(members)):
        for earlier in range(later):
            wins = members[later] >= members[earlier]
            rank[..., earlier] += wins
            rank[..., later] += ~wins
    return rank < kept


def magnitude_mask(weight: Tensor, sparsity: Sparsity) -> Tensor:
    """bool (N, K), True where the weight (N, K) of any float dtype is kept: the largest |w|.

    A share is exact for the whole weight (round(share · N · K) zeros), a pattern in every group of m.
    Raises ValueError as `check` says.
    """
    check(weight, sparsity)
    scores = weight.float().abs()
    if isinstance(sparsity, tuple):
        return keep_largest(scores, sparsity)
    return ~smallest(scores.flatten(), round(sparsity * scores.numel())).view_as(weight)


def wanda_mask(weight: Tensor, norms: Tensor, sparsity: Sparsity) -> Tensor:
    """bool (N, K), True where a weight is kept: the largest |w| · ‖x‖ of its output row.

    weight  (N, K), any float dtype.
    norms   (K,) float: sqrt(Σ x²) of each input channel over the calibration tokens (any common factor is fine).
    A share is exact in every row (round(share · K) zeros), a pattern in every group of m.
    Raises ValueError as `check` says, and for norms of another length, NaN, Inf or negative.
    """
    check(weight, sparsity)
    if norms.shape != weight.shape[1:]:
        raise ValueError(f"expected norms of {weight.shape[1]} inputs, found the shape {tuple(norms.shape)}")
    if not torch.isfinite(norms).all() or (norms < 0).any():
        raise ValueError("the norms of the inputs hold NaN, Inf or negative values")
    return keep_largest(weight.float().abs() * norms.float(), sparsity)
