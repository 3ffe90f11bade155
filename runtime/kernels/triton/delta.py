"""The gated delta rule over the rows of a text: kernels/delta.py's operations, with sums over a key in a tree's order."""

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

    made         (T, queries + keys + values) float32, contiguous: each key head's queries, then its keys, both to be
                 normed; then each value head's values.
    share, left  (T, value heads) of any one stride: before the sigmoid, and before the softplus of the decay.
    weights      step and rate (value heads,) of the decay; of the norms of queries and of keys (key,).
    place        of a token's floats the first matrix of this layer.
    """
    step, rate, query, key = weights
    rows, heads, size = len(made), len(step), len(query)
    out = torch.empty((rows, heads, value), dtype=torch.float32, device=made.device)
    if rows:
        pieces = triton.cdiv(value, _COLUMNS)
        _delta_kernel[(heads * pieces, len(walk.spans))](
            made, share, left, out, *weights, walk.spans, walk.addresses, place, share.stride(0), 1e-6 / size,
            HEADS=heads, EACH=heads // key_heads, KEYS=key_heads * size, KEY=size, VALUE=value, PIECES=pieces,
            PADDED=triton.next_power_of_2(size), COLUMNS=_COLUMNS, num_warps=1, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["place"])
def _delta_kernel(
    made, share, left, out, step, rate, query, key, spans, addresses, place, stride, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PIECES: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(1), tl.program_id(0) // PIECES
    channels: tl.constexpr = 2 * KEYS + HEADS * VALUE
    d, column = tl.arange(0, PADDED), tl.program_id(0) % PIECES * COLUMNS + tl.arange(0, COLUMNS)
    real, wide, alone = d < KEY, column < VALUE, tl.arange(0, 1)
    inside = real[:, None] & wide[None, :]
    at = (head * KEY + d[:, None]) * VALUE + column[None, :]
    query_weight = tl.load(query + d, mask=real, other=0.0)
    key_weight = tl.load(key + d, mask=real, other=0.0)
    own_step, own_rate = tl.load(step + head + alone), tl.load(rate + head + alone)
    first, count = tl.load(spans + 2 * request).to(tl.int64), tl.load(spans + 2 * request + 1)
    matrix = tl.zeros((PADDED, COLUMNS), tl.float32)
    for i in range(count):
        row = first + i
        before, after = tl.load(addresses + 2 * row), tl.load(addresses + 2 * row + 1)
        if follows_another(before):
            matrix = read_state(before, place, at, inside)
        mine = made + row * channels
        q = tl.load(mine + head // EACH * KEY + d, mask=real, other=0.0)
        k = tl.load(mine + KEYS + head // EACH * KEY + d, mask=real, other=0.0)
        v = tl.load(mine + 2 * KEYS + head * VALUE + column, mask=wide, other=0.0)
        q = (q * inverse_root(q, eps, KEY, PADDED)) * query_weight
        k = (k * inverse_root(k, eps, KEY, PADDED)) * key_weight
        given = row * stride + head + alone
        stays = exp(own_rate * softplus(tl.load(left + given) + own_step))
        corrected = sigmoid(tl.load(share + given))
        matrix = matrix * stays[:, None]
        lacking = (v - tl.sum(matrix * k[:, None], axis=0)) * corrected
        matrix = matrix + k[:, None] * lacking[None, :]
        tl.store(out + (row * HEADS + head) * VALUE + column, tl.sum(matrix * q[:, None], axis=0), mask=wide)
        write_state(after, place, at, matrix, inside)
