"""Rounding of inputs to int8 with the reference's bits, and the operations that come right before it, in one kernel.

MODE  what is rounded: "plain": x. "norm": RMSNorm of x.
      "silu": silu(x) · y. "gelu_tanh": gelu(x) · y.
ROWS  rows of one program: 1 on a GPU; many in the interpreter, which pays for every program.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.exact import gelu_tanh, nearest, silu

_LIMIT: tl.constexpr = tl.constexpr(127.0)
# A NaN as a constant would differ from itself, and Triton compiles kernels anew whose constants change.
_NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
_INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["rows"])
def round_rows(
    source, how, codes, step, sums, picked, rows, inputs, stored,
    MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One step a row: x (rows, inputs) to codes (rows, stored), those beyond the inputs zero.

    source  (x, y, weight, the strides of x and y, eps, shift): what MODE works on.
    how     (perm, static) of the weight.
    picked  None, or the expert (rows,) int64 of each row, whose order and static step are taken: perm (E, inputs) and
            static (E,). COUNT adjacent rows come from one row of x then.
    ONCE    BLOCK holds a whole row.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_in = row < rows
    inside = tl.arange(0, BLOCK)
    perm, static = how
    if picked is not None:
        expert = tl.maximum(tl.load(picked + row, mask=row_in, other=0), 0)
        perm = perm + (expert * inputs)[:, None] if perm is not None else None
        static = static + expert if static is not None else None
    root = _inverse_root(source, row, row_in, inputs, MODE, ROWS, BLOCK)[:, None]
    if ONCE:
        # The whole row at once: nothing is read or computed twice.
        at = inside[None, :]
        v = _value(source, perm, row, at, row_in[:, None] & (at < inputs), root, MODE, COUNT)
        bad = (v != v).to(tl.int32)
        highest = tl.where(bad > 0, 0.0, tl.abs(v))
        scale, inverse = _steps(tl.max(highest, axis=1), tl.max(bad, axis=1), static)
        rounded = _rounded(v, inverse[:, None], static)
        added = rounded.to(tl.int32)
        tl.store(codes + row[:, None] * stored + at, rounded, mask=row_in[:, None] & (at < stored))
    else:
        highest = tl.zeros((ROWS, BLOCK), tl.float32)
        bad = tl.zeros((ROWS, BLOCK), tl.int32)
        for start in range(0, inputs, BLOCK):
            at = inside[None, :] + start
            v = _value(source, perm, row, at, row_in[:, None] & (at < inputs), root, MODE, COUNT)
            size = tl.abs(v)
            highest = tl.where(size > highest, size, highest)
            bad |= (v != v).to(tl.int32)
        scale, inverse = _steps(tl.max(highest, axis=1), tl.max(bad, axis=1), static)
        added = tl.zeros((ROWS, BLOCK), tl.int32)
        for start in range(0, stored, BLOCK):
            at = inside[None, :] + start
            v = _value(source, perm, row, at, row_in[:, None] & (at < inputs), root, MODE, COUNT)
            rounded = _rounded(v, inverse[:, None], static)
            added += rounded.to(tl.int32)
            tl.store(codes + row[:, None] * stored + at, rounded, mask=row_in[:, None] & (at < stored))
    tl.store(step + row, scale, mask=row_in)
    if sums is not None:
        tl.store(sums + row, tl.sum(added, axis=1), mask=row_in)


@triton.jit(do_not_specialize=["rows"])
def round_groups(
    source, how, codes, step, sums, picked, rows, inputs, stored, group, padded, columns,
    MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, INSIDE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """One step a row and group: a program rounds GROUPS groups of ROWS rows; BLOCK is of the norm's sum.

    source, how, picked  as round_rows has them.

    Each program of a row adds up its norm again, which costs less than a kernel of its own.
    """
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    roots = _inverse_root(source, first, first < rows, inputs, MODE, ROWS, BLOCK)
    root = tl.reshape(tl.broadcast_to(roots[:, None], (ROWS, GROUPS)), (ROWS * GROUPS,))[:, None]
    pair = tl.arange(0, ROWS * GROUPS)
    row = (tl.program_id(0) * ROWS + pair // GROUPS).to(tl.int64)
    number = tl.program_id(1) * GROUPS + pair % GROUPS
    kept = (row < rows) & (number < columns)
    inside = tl.arange(0, INSIDE)[None, :]
    at = number[:, None] * group + inside
    there = kept[:, None] & (inside < group) & (at < inputs)
    perm, static = how
    if picked is not None:
        expert = tl.maximum(tl.load(picked + row, mask=kept, other=0), 0)
        perm = perm + (expert * inputs)[:, None] if perm is not None else None
        static = static + expert if static is not None else None
    v = _value(source, perm, row, at, there, root, MODE, COUNT)
    size = tl.abs(v)
    bad = (v != v).to(tl.int32)
    highest = tl.max(tl.where(bad > 0, 0.0, size), axis=1)
    scale, inverse = _steps(highest, tl.max(bad, axis=1), static)
    tl.store(step + row * columns + number, scale, mask=kept)
    rounded = _rounded(v, inverse[:, None], static)
    out = row[:, None] * stored + number[:, None] * padded + inside
    tl.store(codes + out, rounded, mask=kept[:, None] & (inside < padded))
    if sums is not None:
        tl.store(sums + row * columns + number, tl.sum(rounded.to(tl.int32), axis=1), mask=kept)


@triton.jit
def _inverse_root(source, row, row_in, inputs, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) by row; 1 where there is no norm."""
    x, _, _, x_stride, _, eps, _ = source
    ones = tl.full((ROWS,), 1.0, tl.float32)
    root = ones
    if MODE == "norm":
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, inputs, BLOCK):
            at = tl.arange(0, BLOCK)[None, :] + start
            v = tl.load(x + row[:, None] * x_stride + at, mask=row_in[:, None] & (at < inputs), other=0.0)
            squares += v * v
        mean = tl.div_rn(tl.sum(squares, axis=1), ones * inputs)
        root = tl.div_rn(ones, tl.sqrt_rn(mean + eps))
    return root


@triton.jit
def _value(source, perm, row, at, there, root, MODE: tl.constexpr, COUNT: tl.constexpr):
    """What is rounded, at places `at` of the kernels' order in the rows `row`; 0 elsewhere."""
    x, y, weight, x_stride, y_stride, _, shift = source
    x_at, y_at = (row // COUNT)[:, None] * x_stride, row[:, None] * y_stride
    if perm is not None:
        at = tl.load(perm + at, mask=there, other=0)
    v = tl.load(x + x_at + at, mask=there, other=0.0)
    if MODE == "norm":
        v = (v * root) * (tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + shift)
    elif MODE == "silu":
        v = silu(v) * tl.load(y + y_at + at, mask=there, other=0.0)
    elif MODE == "gelu_tanh":
        v = gelu_tanh(v) * tl.load(y + y_at + at, mask=there, other=0.0)
    return tl.where(there, v, 0.0)


@triton.jit
def _steps(highest, bad, static):
    """Steps and their inverses (a static step: itself) of absmaxes; a NaN among the inputs makes its step NaN."""
    if static is not None:
        scale = tl.load(static) + tl.zeros_like(highest)
        inverse = scale
    else:
        scale = tl.div_rn(highest, _LIMIT)
        # A subnormal step has an infinite inverse: such inputs are zero for every purpose.
        whole = scale > 0
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(whole, scale, 1.0))
        inverse = tl.where(whole & (inverse < _INF), inverse, 0.0)
    none = tl.full(scale.shape, _NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bad > 0, none, scale), inverse


@triton.jit
def _rounded(v, inverse, static):
    """Codes int8; 0 for a NaN, whose step tells."""
    scaled = tl.div_rn(v, tl.broadcast_to(inverse, v.shape)) if static is not None else v * inverse
    clipped = tl.where(scaled > _LIMIT, _LIMIT, tl.where(scaled < -_LIMIT, -_LIMIT, scaled))
    return nearest(tl.where(clipped == clipped, clipped, 0.0)).to(tl.int8)
