"""Products of rounded inputs with packed codes for few rows: what decoding runs, and the rows of an expert.

Few rows leave a weight to be read once, and that as fast as memory gives it: so K is cut, too, and each warp of a
program takes one split for all outputs of the tile. (A product whose first dimension is a batch gives each warp an
entry of it.) Bits as in product_int.py: sums of integers have no order, and splits of scaled groups are added first to
last.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.expert_rows import rows_of
from runtime.kernels.triton.product_int import finished, load_unit, scaled, unit_product
from runtime.kernels.triton.unpack import chunk_of


@triton.jit(do_not_specialize=["rows"])
def few_rows_product(
    inputs, weight, residual, out, picked, rows, outputs, stored, units, units_per_split,
    CODES: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One scale a row: y = (codes · x) · scale · step.

    inputs  (codes, step, sums) as quantize_inputs.Rounded has them.
    weight  (codes, lower, levels, scale, offset, bias) as weights.GpuWeight has them.
    picked  None, or the experts of each row (expert_rows.rows_of): the weight is a stack of theirs.
    CODES   of unpack.Codes.
    WHOLE   the splits are alike; else the last ones are shorter, or empty.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    n_in = n < outputs
    split = tl.arange(0, SPLITS)
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[None, :, None] * (units * CODES.chunk) + inside[None, None, :]
    at += (split * (units_per_split * CODES.chunk))[:, None, None]
    x_at = inputs[0] + x_row.to(tl.int64)[None, None, :] * stored + inside[None, :, None]
    x_at += (split * (units_per_split * CODES.chunk * CODES.per_byte))[:, None, None]
    total = tl.zeros((SPLITS, BLOCK_N, BLOCK_T), tl.int32)
    turns = units_per_split
    by_output = n
    if picked is not None:
        at += expert * outputs * (units * CODES.chunk)
        by_output = n + expert * outputs
        turns = tl.where(works, turns, 0)
    for turn in range(0, turns):
        n_there, t_there = n_in[None, :], t_in[None, :]
        if not WHOLE:
            there = (split * units_per_split + turn < units)[:, None]
            n_there, t_there = there & n_there, there & t_there
        total = unit_product(total, weight, at, x_at, turn, n_there, t_there, CODES)
    whole = tl.sum(total, axis=0) >> CODES.left
    y = scaled(whole, inputs, weight, x_row, by_output, t_in, n_in)
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    tl.store(out + where, finished(y, weight[5], residual, where, by_output, n_in, here), mask=here)


@triton.jit(do_not_specialize=["rows"])
def few_groups_product(
    inputs, weight, residual, out, picked, rows, outputs, stored, row_bytes, columns, rounds, rounds_per_split,
    CODES: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr,
    PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A scale a group, as product_int.groups_product: rounds and UNITS are explained there."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    n_in = n < outputs
    # Groups of a round, and units: a round of a shared unit holds as many groups as a byte has codes.
    parts: tl.constexpr = CODES.per_byte
    groups: tl.constexpr = parts if UNITS == 0 else 1
    units: tl.constexpr = 1 if UNITS == 0 else UNITS
    split = tl.arange(0, SPLITS)
    begin = split * rounds_per_split
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[None, :, None] * row_bytes + inside[None, None, :]
    at += (begin * (units * CODES.chunk))[:, None, None]
    x_at = inputs[0] + x_row.to(tl.int64)[None, None, :] * stored + inside[None, :, None]
    x_at += (begin * (units * CODES.chunk * CODES.per_byte))[:, None, None]
    by_row = x_row.to(tl.int64)[None, :] * columns + (begin * groups)[:, None]
    by_group, by_output = n[None, :] + (begin * groups * outputs)[:, None], n
    turns = rounds_per_split
    if picked is not None:
        at += expert * outputs * row_bytes
        by_group += expert * columns * outputs
        by_output = n + expert * outputs
        turns = tl.where(works, turns, 0)
    total = tl.zeros((SPLITS, BLOCK_N, BLOCK_T), tl.float32)
    for turn in tl.range(0, turns, num_stages=STAGES):
        n_there, t_there = n_in[None, :], t_in[None, :]
        if not WHOLE:
            there = (begin + turn < rounds)[:, None]
            n_there, t_there = there & n_there, there & t_there
        if UNITS == 0:
            packed, under = load_unit(weight, at, turn, n_there, CODES)
            for part in tl.static_range(parts):
                group = turn * groups + part
                x = tl.load(x_at + group * CODES.chunk, mask=t_there[:, None, :], other=0)
                value = tl.dot(chunk_of(packed, under, weight[2], part, CODES), x, out_dtype=tl.int32) >> CODES.left
                by = group * outputs + by_group
                total += scaled(value, inputs, weight, by_row + group, by, t_there, n_there)
        else:
            value = tl.zeros((SPLITS, BLOCK_N, BLOCK_T), tl.int32)
            for index in range(UNITS):
                value = unit_product(value, weight, at, x_at, turn * UNITS + index, n_there, t_there, CODES)
            by = turn * outputs + by_group
            total += scaled(value >> CODES.left, inputs, weight, by_row + turn, by, t_there, n_there)
    y = added_in_order(total, SPLITS, BLOCK_N, BLOCK_T)
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    tl.store(out + where, finished(y, weight[5], residual, where, by_output, n_in, here), mask=here)


@triton.jit
def added_in_order(parts, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sum (outputs, rows) of splits (SPLITS, outputs, rows), 1, 2 or 4 of them, added first to last."""
    tl.static_assert(SPLITS == 1 or SPLITS == 2 or SPLITS == 4)
    if SPLITS == 1:
        y = tl.reshape(parts, (BLOCK_N, BLOCK_T))
    elif SPLITS == 2:
        first, second = tl.split(tl.permute(parts, (1, 2, 0)))
        y = first + second
    else:
        even, odd = tl.split(tl.reshape(tl.permute(parts, (1, 2, 0)), (BLOCK_N, BLOCK_T, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        y = ((first + second) + third) + fourth
    return y
