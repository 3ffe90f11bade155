"""Targets for rounding that make up for what a layer's inputs have become: GPTAQ's asymmetric term (2504.02692).

Codes are chosen on inputs X that earlier rounded layers have changed, while the original had X̃ there. What is to be
near W X̃ is Ŵ X, and

    ‖W X̃ − Ŵ X‖² = ‖(W* − Ŵ) X‖² + what no Ŵ can change,        W* = W + W C H⁻¹,

with H the mean of x xᵀ and C that of (x̃ − x) xᵀ. So W* rounded by any rule for ‖(W − Ŵ) X‖² is the answer: by GPTQ's,
by a trellis' error feedback, by coordinate descent alike. GPTAQ adds the term within GPTQ's loop, a column at a time;
added beforehand it reaches the earlier columns as well.
"""

import torch
from torch import Tensor

from compress.quantize.gptq import factorize


def targets(weight: Tensor, hessian: Tensor, drift: Tensor, share: float, damping: float) -> Tensor:
    """(N, K) float32: the weight with `share` of the way to W*.

    weight   (N, K); hessian (K, K) float32, the mean of x xᵀ; drift (K, K) float32, the mean of (x̃ − x) xᵀ.
    share    0: the weight as it is; 1: W*. Between them the estimate counts less, which few tokens make a noisy one.
    damping  of H, as `gptq.quantize_together` has it: directions that hardly occur are left alone.
    Raises ValueError for shapes that do not fit, and for an H that is not a Gram matrix.
    """
    k = weight.shape[1]
    if hessian.shape != (k, k) or drift.shape != (k, k):
        raise ValueError(f"weights {list(weight.shape)} do not fit moments {list(hessian.shape)}, {list(drift.shape)}")
    factor, spreads, _ = factorize(hessian, None, damping)
    # H = M D Mᵀ: its inverse from the right is M⁻ᵀ, then D⁻¹, then M⁻¹.
    wanted = (weight.float() @ drift).T
    half = torch.linalg.solve_triangular(factor, wanted, upper=True, unitriangular=True)
    whole = torch.linalg.solve_triangular(factor.T, half / spreads.unsqueeze(1), upper=False, unitriangular=True)
    return weight.float() + share * whole.T
