"""Rounding of inputs to int8 with the reference's bits, and the operations that come right before it, in one kernel.

MODE  what is rounded: "plain": x. "norm": RMSNorm of x. "add_norm": of x + y, which is also written to `total`.
      "silu": silu(x) · y. "gelu": gelu(x) · y.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.exact import gelu_tanh, nearest, silu

_LIMIT: tl.constexpr = tl.constexpr(127.0)
_NAN: tl.constexpr = tl.constexpr(float("nan"))
_INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def round_rows(
    x,
    y,
    weight,
    perm,
    static,
    codes,
    step,
    sums,
    total,
    inputs,
    stored,
    x_stride,
    y_stride,
    eps,
    shift,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step a row: a program rounds a row of x (rows, inputs) to codes (rows, stored), the rest of them zeros."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y_row = y + row * y_stride if y is not None else None
    root = _inverse_root(x, y_row, total, row * inputs, inputs, eps, MODE, BLOCK)
    inside = tl.arange(0, BLOCK)
    highest = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, inputs, BLOCK):
        at = inside + start
        v = _value(x, y_row, weight, perm, at, at < inputs, root, shift, MODE)
        size = tl.abs(v)
        highest = tl.where(size > highest, size, highest)
        bad |= (v != v).to(tl.int32)
    scale, inverse = _steps(tl.max(highest, axis=0), tl.max(bad, axis=0), static)
    tl.store(step + row, scale)
    added = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, stored, BLOCK):
        at = inside + start
        v = _value(x, y_row, weight, perm, at, at < inputs, root, shift, MODE)
        rounded = _rounded(v, inverse, static)
        added += rounded.to(tl.int32)
        tl.store(codes + row * stored + at, rounded, mask=at < stored)
    if sums is not None:
        tl.store(sums + row, tl.sum(added, axis=0))


@triton.jit
def round_groups(
    x,
    y,
    weight,
    perm,
    static,
    codes,
    step,
    sums,
    total,
    inputs,
    stored,
    x_stride,
    y_stride,
    eps,
    shift,
    group,
    padded,
    columns,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_INSIDE: tl.constexpr,
):
    """One step a row and group: a program rounds BLOCK_GROUPS groups of a row; BLOCK is of the norm's sum."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y_row = y + row * y_stride if y is not None else None
    root = _inverse_root(x, y_row, total, row * inputs, inputs, eps, MODE, BLOCK)
    number = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inside = tl.arange(0, BLOCK_INSIDE)
    at = number[:, None] * group + inside[None, :]
    there = (inside < group)[None, :] & (at < inputs)
    v = _value(x, y_row, weight, perm, at, there, root, shift, MODE)
    size = tl.abs(v)
    bad = (v != v).to(tl.int32)
    highest = tl.max(tl.where(bad > 0, 0.0, size), axis=1)
    scale, inverse = _steps(highest, tl.max(bad, axis=1), static)
    kept = number < columns
    tl.store(step + row * columns + number, scale, mask=kept)
    rounded = _rounded(v, inverse[:, None], static)
    out = number[:, None] * padded + inside[None, :]
    tl.store(codes + row * stored + out, rounded, mask=kept[:, None] & (inside < padded)[None, :])
    if sums is not None:
        tl.store(sums + row * columns + number, tl.sum(rounded.to(tl.int32), axis=1), mask=kept)


@triton.jit
def _inverse_root(x, y, total, total_at, inputs, eps, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of a row; "add_norm" adds y first, and writes the sum."""
    root = 0.0
    if MODE == "norm" or MODE == "add_norm":
        inside = tl.arange(0, BLOCK)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, inputs, BLOCK):
            at = inside + start
            v = tl.load(x + at, mask=at < inputs, other=0.0)
            if MODE == "add_norm":
                v += tl.load(y + at, mask=at < inputs, other=0.0)
                # Programs of one row write the same numbers.
                tl.store(total + total_at + at, v, mask=at < inputs)
            squares += v * v
        mean = tl.div_rn(tl.sum(squares, axis=0), tl.cast(inputs, tl.float32))
        root = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    return root


@triton.jit
def _value(x, y, weight, perm, at, there, root, shift, MODE: tl.constexpr):
    """What is rounded, at places `at` of the kernels' order; 0 where nothing is."""
    if perm is not None:
        at = tl.load(perm + at, mask=there, other=0)
    v = tl.load(x + at, mask=there, other=0.0)
    if MODE == "norm" or MODE == "add_norm":
        if MODE == "add_norm":
            v += tl.load(y + at, mask=there, other=0.0)
        v = (v * root) * (tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + shift)
    elif MODE == "silu":
        v = silu(v) * tl.load(y + at, mask=there, other=0.0)
    elif MODE == "gelu":
        v = gelu_tanh(v) * tl.load(y + at, mask=there, other=0.0)
    return tl.where(there, v, 0.0)


@triton.jit
def _steps(highest, bad, static):
    """Step and its inverse (with a static step: the step again) of an absmax; a NaN among the inputs makes it NaN."""
    if static is not None:
        scale = highest * 0.0 + tl.load(static)
        inverse = scale
    else:
        scale = tl.div_rn(highest, _LIMIT)
        inverse = tl.where(scale > 0, tl.div_rn(highest * 0.0 + 1.0, scale), 0.0)
        # A subnormal step has an infinite inverse: such inputs are zero for every purpose.
        inverse = tl.where((inverse == _INF) | (inverse != inverse), 0.0, inverse)
    return tl.where(bad > 0, _NAN, scale), inverse


@triton.jit
def _rounded(v, inverse, static):
    scaled = tl.div_rn(v, inverse + v * 0.0) if static is not None else v * inverse
    clipped = tl.where(scaled > _LIMIT, _LIMIT, tl.where(scaled < -_LIMIT, -_LIMIT, scaled))
    return nearest(tl.where(clipped == clipped, clipped, 0.0)).to(tl.int8)
