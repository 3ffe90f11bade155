"""Products of rounded inputs with packed codes: exact in int32, then scaled in float32 in the reference's order.

The kernels here are for many rows, those of few are in product_few.py: a program takes BLOCK_N outputs and BLOCK_T
rows. Float operations are single IEEE ones (launched without contraction, `quantize_inputs.OPTIONS`), so the bits of a
row depend on its inputs and the weight alone, whatever the tiles.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.unpack import chunk_of


@triton.jit
def scale_kernel(sums, step, added, scale, offset, bias, residual, out, outputs, BLOCK: tl.constexpr):
    """out (rows, outputs) = sums (rows, outputs) int32, and what else there is, in this order.

    · scale, − added · offset, · step (as `scaled` does; `added` are the sums of a row's codes), + bias, + residual.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_in = n < outputs
    t = tl.program_id(1)
    row = t.to(tl.int64) * outputs
    y = tl.load(sums + row + n, mask=n_in, other=0).to(tl.float32) * tl.load(scale + n, mask=n_in, other=0.0)
    if offset is not None:
        y -= tl.load(added + t).to(tl.float32) * tl.load(offset + n, mask=n_in, other=0.0)
    y *= tl.load(step + t)
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)
    if residual is not None:
        y += tl.load(residual + row + n, mask=n_in, other=0.0)
    tl.store(out + row + n, y, mask=n_in)


@triton.jit(do_not_specialize=["rows"])
def rows_product(
    inputs, weight, residual, out, rows, outputs, stored, units,
    CODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One scale a row: y = (codes · x) · scale · step.

    inputs, weight, CODES  as product_few.few_rows_product has them.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n_in, t_in = n < outputs, t < rows
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[:, None] * (units * CODES.chunk) + inside[None, :]
    x_at = inputs[0] + t.to(tl.int64)[None, :] * stored + inside[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
    for unit in range(0, units):
        total = unit_product(total, weight, at, x_at, unit, n_in, t_in, CODES)
    y = scaled(total >> CODES.left, inputs, weight, t, n, t_in, n_in)
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    tl.store(out + where, finished(y, weight[5], residual, where, n, n_in, here), mask=here)


@triton.jit(do_not_specialize=["rows"])
def groups_product(
    inputs, weight, residual, out, rows, outputs, stored, row_bytes, columns, rounds, rounds_per_split,
    CODES: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A scale a group: each group's integer sum is scaled and added, first to last within a split, then the splits.

    A round is what one scale loop sees: a unit whose chunks are groups of their own (UNITS 0), or a group of UNITS
    units.

    inputs, weight, CODES  as product_few.few_rows_product has them.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n_in, t_in = n < outputs, t < rows
    parts: tl.constexpr = CODES.per_byte
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[:, None] * row_bytes + inside[None, :]
    x_at = inputs[0] + t.to(tl.int64)[None, :] * stored + inside[:, None]
    by_row = t.to(tl.int64) * columns
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for number in range(SPLITS):
        part_sum = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        first = number * rounds_per_split
        last = tl.minimum(first + rounds_per_split, rounds)
        for turn in tl.range(first, last, num_stages=STAGES):
            if UNITS == 0:
                packed, under = load_unit(weight, at, turn, n_in, CODES)
                for part in tl.static_range(parts):
                    group = turn * parts + part
                    x = tl.load(x_at + group * CODES.chunk, mask=t_in[None, :], other=0)
                    value = tl.dot(chunk_of(packed, under, weight[2], part, CODES), x, out_dtype=tl.int32)
                    by = group * outputs + n
                    part_sum += scaled(value >> CODES.left, inputs, weight, by_row + group, by, t_in, n_in)
            else:
                value = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
                for index in range(UNITS):
                    value = unit_product(value, weight, at, x_at, turn * UNITS + index, n_in, t_in, CODES)
                by = turn * outputs + n
                part_sum += scaled(value >> CODES.left, inputs, weight, by_row + turn, by, t_in, n_in)
        total += part_sum
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    tl.store(out + where, finished(total, weight[5], residual, where, n, n_in, here), mask=here)


@triton.jit
def load_unit(weight, at, unit, n_in, CODES: tl.constexpr):
    """The bytes (…, outputs, chunk) of a unit, and those of the lower plane where there is one; n_in (…, outputs)."""
    there = tl.expand_dims(n_in, -1)
    packed = tl.load(weight[0] + at + unit * CODES.chunk, mask=there, other=0)
    under = packed
    if CODES.kind == "planes":
        under = tl.load(weight[1] + at + unit * CODES.chunk, mask=there, other=0)
    return packed, under


@triton.jit
def unit_product(total, weight, at, x_at, unit, n_in, t_in, CODES: tl.constexpr):
    """total (…, outputs, rows) int32 plus a unit's codes times the inputs; n_in (…, outputs), t_in (…, rows)."""
    parts: tl.constexpr = CODES.per_byte
    packed, under = load_unit(weight, at, unit, n_in, CODES)
    for part in tl.static_range(parts):
        x = tl.load(x_at + (unit * parts + part) * CODES.chunk, mask=tl.expand_dims(t_in, -2), other=0)
        total = tl.dot(chunk_of(packed, under, weight[2], part, CODES), x, total, out_dtype=tl.int32)
    return total


@triton.jit
def scaled(value, inputs, weight, by_row, by_output, t_in, n_in):
    """(value · scale − sum · offset) · step of one group, (…, outputs, rows) float32.

    by_row, by_output  where the rows' steps and sums, (…, rows), and the outputs' scales and offsets, (…, outputs),
                       stand; t_in and n_in: whether they do.
    """
    _, step, sums = inputs
    _, _, _, scale, offset, _ = weight
    term = value.to(tl.float32) * tl.expand_dims(tl.load(scale + by_output, mask=n_in, other=0.0), -1)
    if offset is not None:
        less = tl.expand_dims(tl.load(offset + by_output, mask=n_in, other=0.0), -1)
        term -= tl.expand_dims(tl.load(sums + by_row, mask=t_in, other=0).to(tl.float32), -2) * less
    return term * tl.expand_dims(tl.load(step + by_row, mask=t_in, other=0.0), -2)


@triton.jit
def finished(y, bias, residual, where, n, n_in, here):
    """y plus the bias, plus the residual stream that the layer adds to."""
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
    if residual is not None:
        y += tl.load(residual + where, mask=here, other=0.0)
    return y
