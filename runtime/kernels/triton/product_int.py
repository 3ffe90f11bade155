"""Products of rounded inputs with packed codes: exact in int32, then scaled in float32 in the reference's order.

A program takes BLOCK_N outputs and BLOCK_T rows. Float operations are single IEEE ones (launched without contraction,
`quantize_inputs.OPTIONS`), so the bits of a row depend on its inputs and the weight alone, whatever the tiles.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.expert_rows import rows_of
from runtime.kernels.triton.unpack import chunk_of


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts, step, sums, scale, offset, bias, residual, out, rows, outputs, splits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the partial sums (splits, rows, outputs), int32 or float32, added in their order, and what else there is.

    In this order: · scale, − sums · offset, · step (as `scaled` does), + bias, + residual.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_in = n < outputs
    t = tl.program_id(1)
    row = t.to(tl.int64) * outputs
    total = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for split in range(splits):
        total += tl.load(parts + row + n + split * rows.to(tl.int64) * outputs, mask=n_in, other=0)
    y = total.to(tl.float32)
    if scale is not None:
        y *= tl.load(scale + n, mask=n_in, other=0.0)
    if offset is not None:
        y -= tl.load(sums + t).to(tl.float32) * tl.load(offset + n, mask=n_in, other=0.0)
    if step is not None:
        y *= tl.load(step + t)
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)
    if residual is not None:
        y += tl.load(residual + row + n, mask=n_in, other=0.0)
    tl.store(out + row + n, y, mask=n_in)


@triton.jit(do_not_specialize=["rows"])
def rows_product(
    inputs, weight, residual, out, picked, rows, outputs, stored, units, units_per_split,
    CODES: tl.constexpr, PARTIAL: tl.constexpr, COUNT: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One scale a row: y = (codes · x) · scale · step. PARTIAL: `out` is (splits, rows, outputs) int32 sums instead.

    Integers may be cut anywhere: their sum has no order.

    inputs  (codes, step, sums) as quantize_inputs.Rounded has them.
    weight  (codes, lower, pairs, scale, offset, bias) as weights.GpuWeight has them.
    picked  None, or the experts of each row (expert_rows.rows_of): the weight is a stack of theirs.
    CODES   of unpack.Codes.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    split = tl.program_id(2)
    n_in = n < outputs
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[:, None] * (units * CODES.chunk) + inside[None, :]
    x_at = inputs[0] + x_row.to(tl.int64)[None, :] * stored + inside[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
    first = split * units_per_split
    last = tl.minimum(first + units_per_split, units)
    by_output = n
    if picked is not None:
        at += expert * outputs * (units * CODES.chunk)
        by_output = n + expert * outputs
        last = tl.where(works, last, first)
    for unit in range(first, last):
        total = unit_product(total, weight, at, x_at, unit, n_in, t_in, CODES)
    total = total >> CODES.left
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    if PARTIAL:
        tl.store(out + split.to(tl.int64) * rows * outputs + where, total, mask=here)
    else:
        y = scaled(total, inputs, weight, x_row, by_output, t_in, n_in)
        tl.store(out + where, finished(y, weight[5], residual, where, by_output, n_in, here), mask=here)


@triton.jit(do_not_specialize=["rows"])
def groups_product(
    inputs, weight, residual, out, picked, rows, outputs, stored, row_bytes, columns, rounds, rounds_per_split,
    CODES: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr, PARTIAL: tl.constexpr, COUNT: tl.constexpr,
    PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A scale a group: each group's integer sum is scaled and added, first to last within a split, then the splits.

    PARTIAL: the program computes one split, and `out` is (splits, rows, outputs) float32. Else it computes all SPLITS
    and adds them as `add_parts` does: the same bits. A round is what one scale loop sees: a unit whose chunks are
    groups of their own (UNITS 0), or a group of UNITS units.

    inputs, weight, picked, CODES  as rows_product has them.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    n_in = n < outputs
    parts: tl.constexpr = CODES.per_byte
    inside = tl.arange(0, CODES.chunk)
    at = n.to(tl.int64)[:, None] * row_bytes + inside[None, :]
    x_at = inputs[0] + x_row.to(tl.int64)[None, :] * stored + inside[:, None]
    by_row = x_row.to(tl.int64) * columns
    by_group, by_output = n, n
    if picked is not None:
        at += expert * outputs * row_bytes
        by_group = n + expert * columns * outputs
        by_output = n + expert * outputs
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for number in range(SPLITS):
        part_sum = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        first = (tl.program_id(2) + number) * rounds_per_split
        last = tl.minimum(first + rounds_per_split, rounds)
        if picked is not None:
            last = tl.where(works, last, first)
        for turn in tl.range(first, last, num_stages=STAGES):
            if UNITS == 0:
                packed, under = load_unit(weight, at, turn, n_in, CODES)
                for part in tl.static_range(parts):
                    group = turn * parts + part
                    x = tl.load(x_at + group * CODES.chunk, mask=t_in[None, :], other=0)
                    value = tl.dot(chunk_of(packed, under, weight[2], part, CODES), x, out_dtype=tl.int32)
                    by = group * outputs + by_group
                    part_sum += scaled(value >> CODES.left, inputs, weight, by_row + group, by, t_in, n_in)
            else:
                value = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
                for index in range(UNITS):
                    value = unit_product(value, weight, at, x_at, turn * UNITS + index, n_in, t_in, CODES)
                by = turn * outputs + by_group
                part_sum += scaled(value >> CODES.left, inputs, weight, by_row + turn, by, t_in, n_in)
        total += part_sum
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    if PARTIAL:
        tl.store(out + tl.program_id(2).to(tl.int64) * rows * outputs + where, total, mask=here)
    else:
        tl.store(out + where, finished(total, weight[5], residual, where, by_output, n_in, here), mask=here)


@triton.jit
def load_unit(weight, at, unit, n_in, CODES: tl.constexpr):
    """The bytes (outputs, chunk) of a unit, and those of the lower plane where there is one."""
    packed = tl.load(weight[0] + at + unit * CODES.chunk, mask=n_in[:, None], other=0)
    under = packed
    if CODES.kind == "planes":
        under = tl.load(weight[1] + at + unit * CODES.chunk, mask=n_in[:, None], other=0)
    return packed, under


@triton.jit
def unit_product(total, weight, at, x_at, unit, n_in, t_in, CODES: tl.constexpr):
    """total (outputs, rows) int32 plus a unit's codes times the inputs."""
    parts: tl.constexpr = CODES.per_byte
    packed, under = load_unit(weight, at, unit, n_in, CODES)
    for part in tl.static_range(parts):
        x = tl.load(x_at + (unit * parts + part) * CODES.chunk, mask=t_in[None, :], other=0)
        total = tl.dot(chunk_of(packed, under, weight[2], part, CODES), x, total, out_dtype=tl.int32)
    return total


@triton.jit
def scaled(value, inputs, weight, by_row, by_output, t_in, n_in):
    """(value · scale − sum · offset) · step of one group, (outputs, rows) float32.

    by_row, by_output  where the rows' steps and sums, and the outputs' scales and offsets stand.
    """
    _, step, sums = inputs
    _, _, _, scale, offset, _ = weight
    term = value.to(tl.float32) * tl.load(scale + by_output, mask=n_in, other=0.0)[:, None]
    if offset is not None:
        less = tl.load(offset + by_output, mask=n_in, other=0.0)
        term -= tl.load(sums + by_row, mask=t_in, other=0).to(tl.float32)[None, :] * less[:, None]
    return term * tl.load(step + by_row, mask=t_in, other=0.0)[None, :]


@triton.jit
def finished(y, bias, residual, where, n, n_in, here):
    """y plus the bias, plus the residual stream that the layer adds to."""
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
    if residual is not None:
        y += tl.load(residual + where, mask=here, other=0.0)
    return y
