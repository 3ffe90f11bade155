"""Arithmetic whose result depends on the values alone: neither on how many rows stand beside them, nor on the machine.

Vectorised library functions treat the last few elements of an array with other code, and are other code on every kind
of processor. Here every transcendental is built from operations that IEEE 754 rounds exactly, and every sum has one
order. It is slow, and it is the meaning of the fast kernels. Products are in fused.py.
"""

import decimal
import math

import torch
from torch import Tensor

# Rows that plain torch takes at once: enough to verify a draft of seven, few enough not to slow width 1.
TILE = 8

_LOG2E = 1.4426950408889634
# ln 2 split so that k · _LN2_HIGH is exact for |k| < 2^11 (Cody and Waite).
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax coefficients of (e^r − 1 − r) / r² on |r| ≤ ln 2 / 2, highest power first (Cephes' expf).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOWEST, _EXP_HIGHEST = -87.3, 88.3

# Hastings' coefficients, highest power first.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERF_STEP = 0.3275911

# π / 2 in parts of 28 bits and a rest, so that k times a part is exact for k < 2^25 (Cody and Waite).
_QUARTERS = tuple(map(float.fromhex, ("0x1.921fb54p+0", "0x1.10b461p-30", "0x1.a62633p-58", "0x1.45c06e0e68948p-86")))
_TURN = 2.0 / math.pi
# Taylor's coefficients of sin(r) / r and cos(r) in r², highest power first: what is left out is below 2^-54 at π / 4.
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(7, -1, -1))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1))


def exp(x: Tensor) -> Tensor:
    """e^x for float32, within 2 units in the last place; 0 below −87.3, and x is capped at 88.3."""
    clipped = x.clamp(_EXP_LOWEST, _EXP_HIGHEST)
    k = torch.floor(clipped * _LOG2E + 0.5)
    r = (clipped - k * _LN2_HIGH) - k * _LN2_LOW
    poly = r * _EXP[0]
    for coefficient in _EXP[1:-1]:
        poly = (poly + coefficient) * r
    poly = (poly + _EXP[-1]) * (r * r) + r + 1.0
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < _EXP_LOWEST, torch.zeros_like(x), poly * power)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x), float32."""
    return 1.0 / (1.0 + exp(-x))


def tanh(x: Tensor) -> Tensor:
    """1 − 2 / (e^2x + 1), float32; absolute error below 2e-7."""
    return 1.0 - 2.0 / (exp(2.0 * x) + 1.0)


def erf(x: Tensor) -> Tensor:
    """The error function, float32; absolute error below 7e-7 (Abramowitz and Stegun, 7.1.26: 1.5e-7, and rounding)."""
    size = x.abs()
    t = 1.0 / (1.0 + _ERF_STEP * size)
    poly = t * _ERF[0]
    for coefficient in _ERF[1:]:
        poly = (poly + coefficient) * t
    y = 1.0 - poly * exp(0.0 - size * size)
    return torch.where(x < 0, 0.0 - y, y)


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos(x) and sin(x) of float32 numbers within ±2^25, each within a unit in the last place of float32.

    Computed in float64 by operations that IEEE 754 rounds exactly, and rounded at the end.
    """
    x = x.double()
    k = torch.floor(x * _TURN + 0.5)
    for part in _QUARTERS:
        x = x - k * part
    square = x * x
    cos, sin = torch.full_like(x, _COS[0]), torch.full_like(x, _SIN[0])
    for coefficient in _COS[1:]:
        cos = cos * square + coefficient
    for coefficient in _SIN[1:]:
        sin = sin * square + coefficient
    cos, sin = cos.float(), (sin * x).float()
    quarter = k.long() & 3
    swapped = quarter % 2 == 1
    cos, sin = torch.where(swapped, sin, cos), torch.where(swapped, cos, sin)
    return torch.where((quarter == 1) | (quarter == 2), -cos, cos), torch.where(quarter >= 2, -sin, sin)


def powers(base: float, exponents: Tensor) -> Tensor:
    """base ** exponents, float32, rounded once: by decimal arithmetic, which is the same everywhere. base > 0.

    For the few exponents of a table, not for speed.
    """
    context = decimal.Context(prec=40)
    found = [float(context.power(decimal.Decimal(base), decimal.Decimal(e))) for e in exponents.float().tolist()]
    return torch.tensor(found, dtype=torch.float64).float()


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: pad to a power of two, add the upper half to the lower, repeat."""
    size = x.shape[-1]
    width = 1 << max(0, size - 1).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension, first to last; a zero term changes nothing, so trailing ones are free."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total
