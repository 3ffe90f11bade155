"""Products of rounded inputs with packed codes: exact in int32, then scaled in float32 in the reference's order.

A program takes BLOCK_N outputs and BLOCK_T rows. Float operations are single IEEE ones (launched without contraction,
`quantize_inputs.OPTIONS`), so the bits of a row depend on its inputs and the weight alone, whatever the tiles.
"""

import triton
import triton.language as tl

from runtime.kernels.triton.expert_rows import rows_of
from runtime.kernels.triton.unpack import chunk_of


@triton.jit(do_not_specialize=["rows"])
def add_groups(parts, scale, bias, residual, out, rows, outputs, splits, BLOCK: tl.constexpr):
    """out = the float32 partial sums (splits, rows, outputs) in their order (· scale) (+ bias) (+ residual)."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_in = n < outputs
    row = tl.program_id(1).to(tl.int64) * outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(parts + row + n + split * rows.to(tl.int64) * outputs, mask=n_in, other=0.0)
    if scale is not None:
        total *= tl.load(scale + n, mask=n_in, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n_in, other=0.0)
    if residual is not None:
        total += tl.load(residual + row + n, mask=n_in, other=0.0)
    tl.store(out + row + n, total, mask=n_in)


@triton.jit(do_not_specialize=["rows"])
def add_rows(
    parts,
    step,
    sums,
    scale,
    offset,
    bias,
    residual,
    out,
    rows,
    outputs,
    splits,
    BLOCK: tl.constexpr,
):
    """out = the int32 partial sums (splits, rows, outputs), added exactly and scaled as `scaled` does."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_in = n < outputs
    t = tl.program_id(1)
    row = t.to(tl.int64) * outputs
    whole = tl.zeros((BLOCK,), tl.int32)
    for split in range(splits):
        whole += tl.load(parts + row + n + split * rows.to(tl.int64) * outputs, mask=n_in, other=0)
    by_output = tl.load(scale + n, mask=n_in, other=0.0)
    y = whole.to(tl.float32) * by_output
    if offset is not None:
        y -= tl.load(sums + t).to(tl.float32) * tl.load(offset + n, mask=n_in, other=0.0)
    y *= tl.load(step + t)
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)
    if residual is not None:
        y += tl.load(residual + row + n, mask=n_in, other=0.0)
    tl.store(out + row + n, y, mask=n_in)


@triton.jit(do_not_specialize=["rows"])
def rows_product(
    x,
    step,
    sums,
    codes,
    lower,
    pairs,
    scale,
    offset,
    bias,
    residual,
    out,
    picked,
    rows,
    outputs,
    stored,
    units,
    units_per_split,
    KIND: tl.constexpr,
    TEXTS: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    PARTIAL: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One scale a row: y = (codes · x) · scale · step. PARTIAL: `out` is (splits, rows, outputs) int32 sums instead.

    Integers may be cut anywhere: their sum has no order.

    picked  None, or the experts of each row (picks.rows_of): the weight is a stack of theirs.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    split = tl.program_id(2)
    n_in = n < outputs
    inside = tl.arange(0, CHUNK)
    at = n.to(tl.int64)[:, None] * (units * CHUNK) + inside[None, :]
    x_at = x + x_row.to(tl.int64)[None, :] * stored + inside[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
    first = split * units_per_split
    last = tl.minimum(first + units_per_split, units)
    by_output = n
    if picked is not None:
        at += expert * outputs * (units * CHUNK)
        by_output = n + expert * outputs
        last = tl.where(works, last, first)
    for unit in range(first, last):
        packed = tl.load(codes + at + unit * CHUNK, mask=n_in[:, None], other=0)
        under = packed
        if KIND == "planes":
            under = tl.load(lower + at + unit * CHUNK, mask=n_in[:, None], other=0)
        for part in tl.static_range(PER_BYTE):
            inputs = tl.load(x_at + (unit * PER_BYTE + part) * CHUNK, mask=t_in[None, :], other=0)
            total = tl.dot(chunk_of(packed, under, pairs, part, KIND, TEXTS), inputs, total, out_dtype=tl.int32)
    total = total >> LEFT
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    if PARTIAL:
        tl.store(out + split.to(tl.int64) * rows * outputs + where, total, mask=here)
    else:
        y = scaled(
            total,
            step + x_row,
            sums + x_row if sums is not None else None,
            scale + by_output,
            offset + by_output if offset is not None else None,
            t_in,
            n_in,
        )
        tl.store(out + where, finished(y, bias, residual, where, by_output, n_in, here), mask=here)


@triton.jit(do_not_specialize=["rows"])
def groups_product(
    x,
    step,
    sums,
    codes,
    lower,
    pairs,
    scale,
    offset,
    bias,
    residual,
    out,
    picked,
    rows,
    outputs,
    stored,
    row_bytes,
    columns,
    rounds,
    rounds_per_split,
    KIND: tl.constexpr,
    TEXTS: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A scale a group: each group's integer sum is scaled and added, first to last within a split, then the splits.

    PARTIAL: the program computes one split, and `out` is (splits, rows, outputs) float32. Else it computes all SPLITS
    and adds them as `add_groups` does: the same bits. A round is what one scale loop sees: a unit whose chunks
    are groups of their own (UNITS 0), or a group of UNITS units.

    picked  as rows_product has it.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row, t, t_in, expert, works = rows_of(rows, picked, COUNT, PAIRED, BLOCK_T)
    n_in = n < outputs
    inside = tl.arange(0, CHUNK)
    at = n.to(tl.int64)[:, None] * row_bytes + inside[None, :]
    x_at = x + x_row.to(tl.int64)[None, :] * stored + inside[:, None]
    step_at = step + x_row.to(tl.int64) * columns
    sums_at = sums + x_row.to(tl.int64) * columns if sums is not None else None
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
                packed = tl.load(codes + at + turn * CHUNK, mask=n_in[:, None], other=0)
                under = packed
                if KIND == "planes":
                    under = tl.load(lower + at + turn * CHUNK, mask=n_in[:, None], other=0)
                for part in tl.static_range(PER_BYTE):
                    group = turn * PER_BYTE + part
                    inputs = tl.load(x_at + group * CHUNK, mask=t_in[None, :], other=0)
                    value = tl.dot(chunk_of(packed, under, pairs, part, KIND, TEXTS), inputs, out_dtype=tl.int32)
                    part_sum += scaled(
                        value >> LEFT,
                        step_at + group,
                        sums_at + group if sums_at is not None else None,
                        scale + group * outputs + by_group,
                        offset + group * outputs + by_group if offset is not None else None,
                        t_in,
                        n_in,
                    )
            else:
                value = tl.zeros((BLOCK_N, BLOCK_T), tl.int32)
                for index in range(UNITS):
                    unit = turn * UNITS + index
                    packed = tl.load(codes + at + unit * CHUNK, mask=n_in[:, None], other=0)
                    under = packed
                    if KIND == "planes":
                        under = tl.load(lower + at + unit * CHUNK, mask=n_in[:, None], other=0)
                    for part in tl.static_range(PER_BYTE):
                        inputs = tl.load(x_at + (unit * PER_BYTE + part) * CHUNK, mask=t_in[None, :], other=0)
                        value = tl.dot(
                            chunk_of(packed, under, pairs, part, KIND, TEXTS), inputs, value, out_dtype=tl.int32
                        )
                part_sum += scaled(
                    value >> LEFT,
                    step_at + turn,
                    sums_at + turn if sums_at is not None else None,
                    scale + turn * outputs + by_group,
                    offset + turn * outputs + by_group if offset is not None else None,
                    t_in,
                    n_in,
                )
        total += part_sum
    where = t.to(tl.int64)[None, :] * outputs + n[:, None]
    here = n_in[:, None] & t_in[None, :]
    if PARTIAL:
        tl.store(out + tl.program_id(2).to(tl.int64) * rows * outputs + where, total, mask=here)
    else:
        tl.store(out + where, finished(total, bias, residual, where, by_output, n_in, here), mask=here)


@triton.jit
def scaled(value, step_at, sums_at, scale_at, offset_at, t_in, n_in):
    """(value · scale − sum · offset) · step of one group, (outputs, rows) float32."""
    by_output = tl.load(scale_at, mask=n_in, other=0.0)
    term = value.to(tl.float32) * by_output[:, None]
    if offset_at is not None:
        less = tl.load(offset_at, mask=n_in, other=0.0)
        term -= tl.load(sums_at, mask=t_in, other=0).to(tl.float32)[None, :] * less[:, None]
    return term * tl.load(step_at, mask=t_in, other=0.0)[None, :]


@triton.jit
def finished(y, bias, residual, where, n, n_in, here):
    """y plus the bias, plus the residual stream that the layer adds to."""
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
    if residual is not None:
        y += tl.load(residual + where, mask=here, other=0.0)
    return y
