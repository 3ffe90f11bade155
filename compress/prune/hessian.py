"""The Hessian of a linear layer's squared output error, H = mean of x xᵀ, and what pruning asks of it."""

import torch
from torch import Tensor

from compress.prune.sparsity import finite


def check(hessian: Tensor, inputs: int) -> None:
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


def upper_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper R with R Rᵀ = H + λ·I, float32, and the damping that it took (see `cholesky`).

    R⁻¹ is the upper factor of (H + λ·I)⁻¹, so that whoever goes through the columns in order needs no inverse of H.
    """
    # Cholesky's factor is lower triangular; turned around at both ends an upper one is.
    lower, used = cholesky(hessian.flip(0, 1), damping)
    return lower.flip(0, 1), used


def energy(weight: Tensor, hessian: Tensor) -> float:
    """tr(W H Wᵀ): the mean squared norm of the layer's output."""
    wide = weight.float()
    return float(torch.sum((wide @ hessian.float()) * wide, dtype=torch.float64))


def relative(error: float, whole: float) -> float:
    """sqrt(error / whole) of two energies; 0 for an output that was nothing and stayed nothing."""
    if error <= 0:
        return 0.0
    return float((error / whole) ** 0.5) if whole > 0 else float("inf")


def output_error(weight: Tensor, changed: Tensor, hessian: Tensor) -> float:
    """sqrt(tr(E H Eᵀ) / tr(W H Wᵀ)) with E = W − Ŵ: the relative error of the layer's output."""
    return relative(energy(weight.float() - changed.float(), hessian), energy(weight, hessian))
