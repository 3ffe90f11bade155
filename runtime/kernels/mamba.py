"""A state space (Mamba-2, 2405.21060), row by row: each head keeps a matrix that rows add to and read from.

The meaning of the native kernels' (native/mamba_layer.cpp, state_space.cpp), bit for bit; see reference.py.
"""

from torch import Tensor

from runtime.kernels.activations import silu
from runtime.kernels.delta import softplus
from runtime.kernels.exact import exp, ordered_sum
from runtime.kernels.reference import rms_norm


def steps(x: Tensor, bias: Tensor, rate: Tensor, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """How long each head's step is, of x (T, heads) float32, and what is left of its matrix: e^(rate · step)."""
    step = softplus(x + bias).clamp(*limits)
    return step, exp(rate * step)


def advance(
    state: Tensor, x: Tensor, b: Tensor, c: Tensor, step: Tensor, left: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """A row's output (heads, dim), and the matrices (heads, state, dim) behind it.

    x (heads, dim); b, c (heads, state); step, left, skip (heads,). Sums go over the dimensions of c, first to last, and
    then the input itself is added.
    """
    added = x * step.unsqueeze(-1)
    state = state * left.view(-1, 1, 1) + b.unsqueeze(-1) * added.unsqueeze(1)
    return ordered_sum(state.transpose(0, 1) * c.t().unsqueeze(-1)) + x * skip.unsqueeze(-1), state


def gated(x: Tensor, gates: Tensor, norm: Tensor | None, eps: float, gate_first: bool) -> Tensor:
    """Outputs x (T, values) times SiLU of their gates; normed group by group by `norm` (groups, values / groups), then
    or before."""
    factors = silu(gates)
    if norm is None:
        return factors * x
    grouped = (factors * x if gate_first else x).view(-1, *norm.shape)
    normed = rms_norm(grouped, norm, eps).flatten(1)
    return normed if gate_first else factors * normed
