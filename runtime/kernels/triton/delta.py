"""The gated delta rule over the rows of a text: kernels/delta.py, with sums over a key in a tree's order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.exact import exp, inverse_root, sigmoid, softplus
from runtime.kernels.triton.quantize_inputs import OPTIONS
from runtime.kernels.triton.row_states import Walk, follows_another, read_state, write_state

# Dimensions of a value of one program: one warp, whose sums need no other.
_COLUMNS = 8


def delta_rule(
    made: Tensor,
    share: Tensor,
    left: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    key_heads: int,
    value: int,
    walk: Walk,
    place: int,
) -> Tensor:
    """What each value head reads from its matrix, (T, value heads, value) float32.

    made         (T, queries + keys + values) float32, contiguous: queries of each key head, then keys, which are normed
                 here, in place; then values of each value head.
    share, left  (T, value heads) of any one stride: before the sigmoid, and before the softplus of the decay.
    weights      step and rate (value heads,) of the decay; of the norms of queries and of keys (key,).
    place        of a token's floats the first matrix of this layer.
    """
    rows, heads, size = len(made), len(weights[0]), len(weights[2])
    out = torch.empty((rows, heads, value), dtype=torch.float32, device=made.device)
    if rows:
        pieces, keys = triton.cdiv(value, _COLUMNS), key_heads * size
        how = torch.empty((rows, 2, heads), dtype=torch.float32, device=made.device)
        _prepare_kernel[(rows, 2 * key_heads + 1)](
            made, share, left, how, *weights, share.stride(0), 1e-6 / size, made.shape[1],
            HEADS=heads, KEY_HEADS=key_heads, KEY=size, PADDED=triton.next_power_of_2(size),
            HEADS_PADDED=triton.next_power_of_2(heads), num_warps=1, **OPTIONS,
        )  # fmt: skip
        _delta_kernel[(heads * pieces, len(walk.spans))](
            made, how, out, walk.spans, walk.addresses, place, made.shape[1],
            HEADS=heads, EACH=heads // key_heads, KEYS=keys, KEY=size, VALUE=value, PIECES=pieces,
            PADDED=triton.next_power_of_2(size), COLUMNS=_COLUMNS, HALVES=walk.halves,
            num_warps=1, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit
def _prepare_kernel(
    made, share, left, how, step, rate, query, key, stride, eps, channels,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, PADDED: tl.constexpr, HEADS_PADDED: tl.constexpr,
):  # fmt: skip
    """What a row is alone: its queries and keys normed in place; and into `how` (T, 2, heads) by how much each head's
    matrix is corrected, and what stays of it."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if number < 2 * KEY_HEADS:
        d = tl.arange(0, PADDED)
        at = made + row * channels + number * KEY + d
        x = tl.load(at, mask=d < KEY, other=0.0)
        weight = query if number < KEY_HEADS else key
        by = tl.load(weight + d, mask=d < KEY, other=0.0)
        tl.store(at, (x * inverse_root(x, eps, KEY, PADDED)) * by, mask=d < KEY)
    else:
        h = tl.arange(0, HEADS_PADDED)
        real = h < HEADS
        corrected = sigmoid(tl.load(share + row * stride + h, mask=real, other=0.0))
        moved = tl.load(left + row * stride + h, mask=real, other=0.0) + tl.load(step + h, mask=real, other=0.0)
        stays = exp(tl.load(rate + h, mask=real, other=0.0) * softplus(moved))
        tl.store(how + row * 2 * HEADS + h, corrected, mask=real)
        tl.store(how + row * 2 * HEADS + HEADS + h, stays, mask=real)


@triton.jit(do_not_specialize=["place"])
def _delta_kernel(
    made, how, out, spans, addresses, place, channels,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PIECES: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(1), tl.program_id(0) // PIECES
    d, column = tl.arange(0, PADDED), tl.program_id(0) % PIECES * COLUMNS + tl.arange(0, COLUMNS)
    real, wide = d < KEY, column < VALUE
    inside = real[:, None] & wide[None, :]
    at = (head * KEY + d[:, None]) * VALUE + column[None, :]
    first, count = tl.load(spans + 2 * request).to(tl.int64), tl.load(spans + 2 * request + 1)
    matrix = tl.zeros((PADDED, COLUMNS), tl.float32)
    for i in range(count):
        row = first + i
        before, after = tl.load(addresses + 2 * row), tl.load(addresses + 2 * row + 1)
        if follows_another(before):
            matrix = read_state(before, place, at, inside, HALVES)
        mine, own = made + row * channels, how + row * 2 * HEADS + head
        q = tl.load(mine + head // EACH * KEY + d, mask=real, other=0.0)[:, None]
        k = tl.load(mine + KEYS + head // EACH * KEY + d, mask=real, other=0.0)[:, None]
        v = tl.load(mine + 2 * KEYS + head * VALUE + column, mask=wide, other=0.0)
        matrix = matrix * tl.load(own + HEADS)
        lacking = (v - tl.sum(matrix * k, axis=0)) * tl.load(own)
        matrix = matrix + k * lacking[None, :]
        tl.store(out + (row * HEADS + head) * VALUE + column, tl.sum(matrix * q, axis=0), mask=wide)
        matrix = write_state(after, place, at, matrix, inside, HALVES)
