"""Keys and values in the basis of their head on the device, with the bits of runtime/kernels/basis.py.

Kernels that use this are compiled without fused products (enable_fp_fusion=False).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.basis import BACK
from runtime.kernels.triton.exact import nearest


def turn_back(x: Tensor, basis: Tensor) -> Tensor:
    """x · back of x (T, heads, d) float32 contiguous, by the bases (kv_heads, 3, d, d) of a layer."""
    out = torch.empty_like(x)
    rows, heads, dim = x.shape
    if rows:
        _turn_kernel[(rows, heads)](
            x, basis, out, HEADS=heads, PER=heads // len(basis), DIM=dim, PADDED=triton.next_power_of_2(dim),
            PART=BACK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _turn_kernel(
    x, basis, out,
    HEADS: tl.constexpr, PER: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    matrix = basis + ((head // PER).to(tl.int64) * 3 + PART) * DIM * DIM
    at, d = (row * HEADS + head) * DIM, tl.arange(0, PADDED)
    tl.store(out + at + d, turned_memory(x + at, matrix, d, d < DIM, DIM, PADDED), mask=d < DIM)


@triton.jit
def turned_memory(source, matrix, d, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Entries d (PADDED,) of x · matrix, of x (DIM,) in memory; 0 where not `real`."""
    out = tl.zeros((PADDED,), tl.float32)
    for j in range(DIM):
        out += tl.load(source + j) * tl.load(matrix + j * DIM + d, mask=real, other=0.0)
    return out


@triton.jit
def turned_registers(x, matrix, d, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The same of x (PADDED,) as it is held, entry by entry."""
    out = tl.zeros((PADDED,), tl.float32)
    for j in range(DIM):
        out += tl.sum(tl.where(d == j, x, 0.0), axis=0) * tl.load(matrix + j * DIM + d, mask=real, other=0.0)
    return out


@triton.jit
def rounded_signed(x, d, real, feedback, LIMIT: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr):
    """round_signed of one row, whose entry d stands where `d` says (one-dimensional, `real` entries only): codes as
    float32, and the scale. feedback (DIM, DIM) or None."""
    bad = tl.max((real & (x != x)).to(tl.int32), axis=0) > 0
    highest = tl.maximum(tl.max(tl.where(real, x, 0.0), axis=0), 0.0)
    lowest = tl.minimum(tl.min(tl.where(real, x, 0.0), axis=0), 0.0)
    scale = tl.div_rn(tl.where(highest >= -lowest, highest, lowest), LIMIT)
    scale = tl.where(bad, float("nan"), scale)
    inverse = tl.where(scale != 0.0, tl.div_rn(1.0, scale), 0.0)
    inverse = tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)
    open_ = tl.where(real, x * inverse, 0.0)
    if feedback is None:
        code = _within(nearest(open_), HALF)
    else:
        left = open_
        code = tl.zeros_like(open_)
        for n in range(DIM):
            i = DIM - 1 - n
            here = real & (d == i)
            own = _within(nearest(tl.sum(tl.where(here, left, 0.0), axis=0)), HALF)
            lost = tl.sum(tl.where(here, open_, 0.0), axis=0) - own
            code = tl.where(here, own, code)
            left += lost * tl.load(feedback + i * DIM + d, mask=real & (d < i), other=0.0)
    return code, scale


@triton.jit
def _within(code, HALF: tl.constexpr):
    """A code −HALF..HALF − 1; 0 for NaN."""
    code = tl.where(code < -HALF, -HALF, tl.where(code > HALF - 1, HALF - 1, code))
    return tl.where(code == code, code, 0.0)
