"""What stands between two layers of an MLP, in plain torch: activations, and what a gate makes of a factor.

The meaning of the native kernels' (native/rows.cpp), bit for bit; see reference.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.checkpoints.record import Activation
from runtime.kernels.exact import erf, exp, sigmoid, tanh


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the tanh form of Hendrycks and Gimpel."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


def gelu(x: Tensor) -> Tensor:
    """GELU: x · Φ(x)."""
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))


def relu(x: Tensor) -> Tensor:
    """x, and 0 below; a NaN stays."""
    return torch.where(x < 0, torch.zeros_like(x), x)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """xIELU (2411.13010): parameters (4,) are αₚ, αₙ, β and the ε that e^x − 1 begins from."""
    positive, negative, beta, start = parameters
    low = (exp(torch.minimum(x, start)) - 1.0) - x
    return torch.where(x > 0, (positive * x) * x, low * negative) + beta * x


def clamped_swiglu(gate: Tensor, up: Tensor, parameters: Tensor) -> Tensor:
    """gpt-oss's: parameters (2,) are the limit, and what the gate is multiplied by inside of the sigmoid."""
    limit, alpha = parameters
    gate, up = torch.minimum(gate, limit), torch.minimum(torch.maximum(up, -limit), limit)
    return (gate * sigmoid(gate * alpha)) * (up + 1.0)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": relu,
    "relu2": lambda x: relu(x) * relu(x),
}


def activate(kind: Activation, gate: Tensor, up: Tensor | None, parameters: Tensor | None = None) -> Tensor:
    """act(gate) · up; without `up` the activation alone."""
    if kind == "clamped_swiglu":
        assert up is not None and parameters is not None
        return clamped_swiglu(gate, up, parameters)
    if kind == "xielu":
        assert parameters is not None
        y = xielu(gate, parameters)
    else:
        y = _ACTIVATIONS[kind](gate)
    return y if up is None else y * up
