"""The gated delta rule (2412.06464), row by row: each head keeps a matrix that gives a value for a key.

The meaning of the native kernels' (native/delta_layer.cpp, delta_rule.cpp), bit for bit; see reference.py.
"""

import torch
from torch import Tensor

from runtime.kernels.exact import exp, ordered_sum

# Of 2 · atanh(s) / s in s², highest power first: s is a third at most, and what is left out below 2^-26 of the first.
_ATANH = tuple(2.0 / (2 * n + 1) for n in range(8, -1, -1))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), float32: the larger of x and 0, and ln(1 + t) of t = e^−|x|, which is 2 · atanh(t / (2 + t))."""
    t = exp(0.0 - x.abs())
    s = t / (2.0 + t)
    square, poly = s * s, torch.full_like(s, _ATANH[0])
    for coefficient in _ATANH[1:]:
        poly = poly * square + coefficient
    return torch.where(x > 0, x, torch.zeros_like(x)) + poly * s


def decay(x: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """What a row leaves of each head's matrix: e^(rate · softplus(x + bias)), the rates being below 0."""
    return exp(rate * softplus(x + bias))


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, left: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """A row's output (heads, value), and the matrices (heads, key, value) behind it.

    q, k (heads, key); v (heads, value); left and share (heads,): what stays of a matrix, and by how much of what it
    lacks it is corrected. Sums go over the dimensions of a key, first to last.
    """
    state = state * left.view(-1, 1, 1)
    columns = k.t().unsqueeze(-1)
    lacking = (v - ordered_sum(state.transpose(0, 1) * columns)) * share.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * lacking.unsqueeze(1)
    return ordered_sum(state.transpose(0, 1) * q.t().unsqueeze(-1)), state
