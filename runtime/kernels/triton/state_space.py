"""State spaces over the rows of a text: kernels/mamba.py's operations, with sums over a state in a tree's order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.exact import exp, softplus
from runtime.kernels.triton.quantize_inputs import OPTIONS
from runtime.kernels.triton.row_states import Walk, follows_another, read_state, write_state

# Dimensions of a head of one program: one warp, whose sums need no other.
_COLUMNS = 8


def state_space(
    made: Tensor,
    times: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
    groups: int,
    state: int,
    walk: Walk,
    place: int,
) -> Tensor:
    """What each head reads from its matrix, and its input besides: (T, heads · dim) float32.

    made     (T, heads · dim + 2 · groups · state) float32, contiguous: inputs, then Bs and Cs of each group of heads.
    times    (T, heads) of any stride: steps before their softplus; they lie within `limits` then.
    weights  step, rate and skip, (heads,) each.
    place    of a token's floats the first matrix of this layer.
    """
    rows, heads = len(made), len(weights[0])
    dim = (made.shape[1] - 2 * groups * state) // heads
    out = torch.empty((rows, heads * dim), dtype=torch.float32, device=made.device)
    if rows:
        pieces, each = (
            triton.cdiv(dim, _COLUMNS),
            torch.empty((rows, 2, heads), dtype=torch.float32, device=made.device),
        )
        _steps_kernel[(rows,)](
            times, each, *weights[:2], times.stride(0), *limits,
            HEADS=heads, PADDED=triton.next_power_of_2(heads), num_warps=1, **OPTIONS,
        )  # fmt: skip
        _space_kernel[(heads * pieces, len(walk.spans))](
            made, each, out, weights[2], walk.spans, walk.addresses, place,
            HEADS=heads, EACH=heads // groups, VECTORS=groups * state, STATE=state, DIM=dim, PIECES=pieces,
            PADDED=triton.next_power_of_2(state), COLUMNS=_COLUMNS, HALVES=walk.halves,
            num_warps=1, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def _steps_kernel(times, each, step, rate, stride, least, most, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """mamba.steps of a row, into (T, 2, heads)."""
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    real = h < HEADS
    x = tl.load(times + row * stride + h, mask=real, other=0.0) + tl.load(step + h, mask=real, other=0.0)
    time = softplus(x)
    # As torch's clamp, a NaN stays one.
    time = tl.where(time < least, least, tl.where(time > most, most, time))
    left = exp(tl.load(rate + h, mask=real, other=0.0) * time)
    tl.store(each + row * 2 * HEADS + h, time, mask=real)
    tl.store(each + row * 2 * HEADS + HEADS + h, left, mask=real)


@triton.jit(do_not_specialize=["place"])
def _space_kernel(
    made, each, out, skip, spans, addresses, place,
    HEADS: tl.constexpr, EACH: tl.constexpr, VECTORS: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr,
    PIECES: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(1), tl.program_id(0) // PIECES
    values: tl.constexpr = HEADS * DIM
    d, column = tl.arange(0, PADDED), tl.program_id(0) % PIECES * COLUMNS + tl.arange(0, COLUMNS)
    real, wide = d < STATE, column < DIM
    inside = real[:, None] & wide[None, :]
    at = (head * STATE + d[:, None]) * DIM + column[None, :]
    own_skip = tl.load(skip + head)
    first, count = tl.load(spans + 2 * request).to(tl.int64), tl.load(spans + 2 * request + 1)
    matrix = tl.zeros((PADDED, COLUMNS), tl.float32)
    for i in range(count):
        row = first + i
        before, after = tl.load(addresses + 2 * row), tl.load(addresses + 2 * row + 1)
        if follows_another(before):
            matrix = read_state(before, place, at, inside, HALVES)
        mine, own = made + row * (values + 2 * VECTORS), each + row * 2 * HEADS + head
        x = tl.load(mine + head * DIM + column, mask=wide, other=0.0)
        b = tl.load(mine + values + head // EACH * STATE + d, mask=real, other=0.0)[:, None]
        c = tl.load(mine + values + VECTORS + head // EACH * STATE + d, mask=real, other=0.0)[:, None]
        matrix = matrix * tl.load(own + HEADS) + b * (x * tl.load(own))[None, :]
        read = tl.sum(matrix * c, axis=0) + x * own_skip
        tl.store(out + row * values + head * DIM + column, read, mask=wide)
        matrix = write_state(after, place, at, matrix, inside, HALVES)
