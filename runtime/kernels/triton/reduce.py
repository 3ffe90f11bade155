"""The second step of products that were cut along K: partial sums added first to last, and the layer's end."""

import triton
import triton.language as tl


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
    """out = the int32 partial sums (splits, rows, outputs), added exactly and scaled as `integer.scaled` does."""
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
