"""runtime/kernels/exact.py's functions, operation by operation: single IEEE operations (launched without contraction),
so that the bits are the reference's."""

import triton
import triton.language as tl


@triton.jit
def tree_sum(x, SIZE: tl.constexpr):
    """exact.tree_sum of (SIZE,), a power of two up to 2^20: the upper half is added to the lower, again and again."""
    for i in tl.static_range(0, 20):
        if (SIZE >> i) > 1:
            x = tl.sum(tl.reshape(x, (2, SIZE >> (i + 1))), axis=0)
    return tl.sum(x)


@triton.jit
def inverse_root(x, eps, width, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of x (BLOCK,), zeros beyond `width`."""
    mean = tl.div_rn(tree_sum(x * x, BLOCK), width * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)
_LN2_LOW: tl.constexpr = tl.constexpr(-2.12194440e-4)
# Adding and subtracting it rounds a float32 below 2^22 to the nearest integer, ties to even.
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def nearest(v):
    """The nearest integer, ties to even, of |v| < 2^22; a float32."""
    return (v + _ROUNDER) - _ROUNDER


@triton.jit
def exp(v):
    """e^v; 0 below −87.3, and v is capped at 88.3. A NaN stays one."""
    clipped = tl.where(v < -87.3, -87.3, tl.where(v > 88.3, 88.3, v))
    k = tl.floor(clipped * _LOG2E + 0.5)
    r = (clipped - k * _LN2_HIGH) - k * _LN2_LOW
    poly = r * 1.9875691500e-4
    poly = (poly + 1.3981999507e-3) * r
    poly = (poly + 8.3334519073e-3) * r
    poly = (poly + 4.1665795894e-2) * r
    poly = (poly + 1.6666665459e-1) * r
    poly = (poly + 5.0000001201e-1) * (r * r) + r + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(v < -87.3, 0.0, poly * power)


@triton.jit
def silu(v):
    """v · sigmoid(v)."""
    return v * sigmoid(v)


@triton.jit
def gelu_tanh(v):
    """GELU in its tanh form."""
    inner = 0.7978845608028654 * (v + 0.044715 * (v * v * v))
    tanh = 1.0 - tl.div_rn(tl.full(v.shape, 2.0, tl.float32), exp(2.0 * inner) + 1.0)
    return 0.5 * v * (1.0 + tanh)


@triton.jit
def sigmoid(v):
    """1 / (1 + e^−v)."""
    return tl.div_rn(tl.full(v.shape, 1.0, tl.float32), 1.0 + exp(-v))


@triton.jit
def softplus(v):
    """ln(1 + e^v), as kernels/delta.py has it."""
    t = exp(0.0 - tl.abs(v))
    s = tl.div_rn(t, 2.0 + t)
    square = s * s
    poly = tl.full(v.shape, 2.0 / 17.0, tl.float32)
    for i in tl.static_range(1, 9):
        poly = poly * square + 2.0 / (17 - 2 * i)
    return tl.where(v > 0, v, 0.0) + poly * s
