"""Sums within a row, in the reference's order: the bits are those of exact.tree_sum."""

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
