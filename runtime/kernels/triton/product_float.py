"""Products of float32 inputs with float weights as the file has them (bfloat16, float16, float32, fp8).

Tensor cores multiply 8-bit mantissas (bfloat16) or 11-bit ones (tf32) exactly and add in float32. So inputs are cut
into three terms of 8 or 11 bits, which together are the float32 number, and each is multiplied by the weight: three
products whose error is that of float32 addition alone. float32 weights have no such cut: their products are float32's.
fp8 (E4M3) has values that bfloat16 holds exactly; a row's scale is multiplied once, to the sum.

Tensor cores cut off what they add, always towards zero, so each block of BLOCK_K inputs has sums of its own, which are
then added with rounding.

Error of y, against the exact product: a sum is rounded, or truncated by one unit, once for each tensor-core step of a
block and once for each block (K times for float32 weights), so |y − exact| ≤ (K + splits) · 2⁻²³ · Σ|w · x|, plus what
of x lies below bfloat16's range (2⁻¹³³).
"""

import triton
import triton.language as tl

from runtime.kernels.triton.expert_rows import rows_of
from runtime.kernels.triton.product_few import added_in_order
from runtime.kernels.triton.product_int import finished


@triton.jit(do_not_specialize=["rows"])
def float_product(
    x, weight, scale, bias, residual, out, picked, rows, outputs, inputs, x_stride, blocks_per_split,
    KIND: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr, INTERPRETED: tl.constexpr,
    COUNT: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y (rows, outputs) = x Wᵀ. Each warp takes a split of K, as product_few.py has it; splits are added in order.

    KIND         "bfloat16", "float16", "float32" or "fp8" (`weight` is its bytes).
    scale        (outputs,), or None.
    picked       None, or the experts of each row (expert_rows.rows_of): the weight is a stack of theirs.
    WHOLE        K is SPLITS · blocks_per_split · BLOCK_K inputs, so no load has to look at k.
    INTERPRETED  the interpreter's products know no bfloat16, and their bits depend on a row's place: plain sums.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    n_in = n < outputs
    split = tl.arange(0, SPLITS)
    begin = split * (blocks_per_split * BLOCK_K)
    inside = tl.arange(0, BLOCK_K)
    weight_at = weight + n.to(tl.int64)[None, :, None] * inputs + inside[None, None, :] + begin[:, None, None]
    x_at = x + x_row.to(tl.int64)[None, None, :] * x_stride + inside[None, :, None] + begin[:, None, None]
    turns = blocks_per_split
    by_output = n
    if picked is not None:
        weight_at += expert * outputs * inputs
        by_output = n + expert * outputs
        turns = tl.where(works, turns, 0)
    total = tl.zeros((SPLITS, BLOCK_N, BLOCK_T), tl.float32)
    for turn in range(0, turns):
        k = turn * BLOCK_K
        w_there, x_there = n_in[None, :, None], t_in[None, None, :]
        if not WHOLE:
            k_in = begin[:, None] + k + inside[None, :] < inputs
            w_there, x_there = w_there & k_in[:, None, :], x_there & k_in[:, :, None]
        w = tl.load(weight_at + k, mask=w_there, other=0.0)
        v = tl.load(x_at + k, mask=x_there, other=0.0)
        block = tl.zeros((SPLITS, BLOCK_N, BLOCK_T), tl.float32)
        if KIND == "float32":
            block = _times(w, v, block, "ieee", INTERPRETED)
        elif KIND == "float16":
            # Every float16 is a tf32 number. Terms by truncation: each is exact, and so is what it leaves.
            wide = w.to(tl.float32)
            high = _upper_bits(v, 13)
            rest = v - high
            middle = _upper_bits(rest, 13)
            block = _times(wide, rest - middle, block, "tf32", INTERPRETED)
            block = _times(wide, middle, block, "tf32", INTERPRETED)
            block = _times(wide, high, block, "tf32", INTERPRETED)
        else:
            if KIND == "fp8":
                w = _from_e4m3(w)
            high = _upper_bits(v, 16)
            rest = v - high
            middle = _upper_bits(rest, 16)
            block = _times(w, (rest - middle).to(tl.bfloat16), block, "tf32", INTERPRETED)
            block = _times(w, middle.to(tl.bfloat16), block, "tf32", INTERPRETED)
            block = _times(w, high.to(tl.bfloat16), block, "tf32", INTERPRETED)
        total += block
    y = added_in_order(total, SPLITS, BLOCK_N, BLOCK_T)
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    if scale is not None:
        y *= tl.load(scale + by_output, mask=n_in, other=0.0)[:, None]
    tl.store(out + where, finished(y, bias, residual, where, by_output, n_in, here), mask=here)


@triton.jit
def _times(w, v, part, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """part + w · v of each split; PRECISION is of float32 operands, which is what they are then."""
    if INTERPRETED:
        terms = w.to(tl.float32)[:, :, None, :] * tl.permute(v.to(tl.float32), (0, 2, 1))[:, None, :, :]
        part += tl.sum(terms, axis=3)
    else:
        part = tl.dot(w, v, part, input_precision=PRECISION)
    return part


@triton.jit
def _from_e4m3(w):
    """Bytes of E4M3, none of them NaN, as bfloat16, exactly.

    Without instructions that only newer GPUs have: shifted to float16's fields a byte is its value times 2⁻⁸, the
    exponents' biases being 7 and 15, subnormal or not. The factor is undone in float32, which holds both.
    """
    wide = w.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * 256.0).to(tl.bfloat16)


@triton.jit
def _upper_bits(v, BITS: tl.constexpr):
    """v (float32) with its lowest BITS bits cleared."""
    return ((v.to(tl.int32, bitcast=True) >> BITS) << BITS).to(tl.float32, bitcast=True)
