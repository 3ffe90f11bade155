"""Wanda: a weight is worth its magnitude times the norm of its input (Sun et al. 2023, 2306.11695)."""

import torch
from torch import Tensor

from compress.prune.sparsity import Sparsity, check, keep_largest


def wanda_mask(weight: Tensor, norms: Tensor, sparsity: Sparsity) -> Tensor:
    """bool (N, K), True where a weight is kept: the largest |w| · ‖x‖ of its output row.

    weight  (N, K), any float dtype.
    norms   (K,) float: sqrt(Σ x²) of each input channel over the calibration tokens (any common factor is fine).
    A share is exact in every row (round(share · K) zeros), a pattern in every group of m.
    Raises ValueError as `sparsity.check` says, and for norms of another length, NaN, Inf or negative.
    """
    check(weight, sparsity)
    if norms.shape != weight.shape[1:]:
        raise ValueError(f"expected norms of {weight.shape[1]} inputs, found the shape {tuple(norms.shape)}")
    if not torch.isfinite(norms).all() or (norms < 0).any():
        raise ValueError("the norms of the inputs hold NaN, Inf or negative values")
    return keep_largest(weight.float().abs() * norms.float(), sparsity)
