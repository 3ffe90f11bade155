"""Magnitude pruning: the smallest weights go. Looks at no text: what the other methods have to beat."""

from torch import Tensor

from compress.prune.sparsity import Sparsity, check, keep_largest, smallest


def magnitude_mask(weight: Tensor, sparsity: Sparsity) -> Tensor:
    """bool (N, K), True where the weight (N, K) of any float dtype is kept: the largest |w|.

    A share is exact for the whole weight (round(share · N · K) zeros), a pattern in every group of m.
    Raises ValueError as `sparsity.check` says.
    """
    check(weight, sparsity)
    scores = weight.float().abs()
    if isinstance(sparsity, tuple):
        return keep_largest(scores, sparsity)
    return ~smallest(scores.flatten(), round(sparsity * scores.numel())).view_as(weight)
