"""The largest of a row of logits, and the experts of a row of a mixture: the reference's choices and bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.exact import exp, tree_sum

# Logits of one program.
_PIECE = 4096


def largest(logits: Tensor, limit: int | None = None) -> Tensor:
    """Where each row (T, V) float32 is largest among its first `limit` entries, the first of equals: (T,) int64.

    −1 for a row with a NaN, with +∞, or with nothing above −∞, wherever in the row. Nothing waits for the device.
    """
    rows, size = logits.shape
    pieces = triton.cdiv(size, _PIECE)
    values = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        limit = size if limit is None else limit
        _piece_kernel[(rows, pieces)](logits, values, places, logits.stride(0), size, limit, pieces, PIECE=_PIECE)
        _best_kernel[(rows,)](values, places, out, pieces, PIECES=triton.next_power_of_2(pieces), num_warps=1)
    return out


def route(scores: Tensor, count: int, renormalize: bool, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Shares (T, count) float32 and experts (T, count) int64 of router scores (T, E) float32, the largest first.

    Softmax over all experts, the `count` most probable (the first of equals), their shares divided by their sum where
    `renormalize`: LlamaDecoder's operations, in their order. Rows whose position (T,) int32 is negative, which nobody
    reads, get the expert −1, which is none.
    """
    rows, experts = scores.shape
    shares = torch.empty((rows, count), dtype=torch.float32, device=scores.device)
    chosen = torch.empty((rows, count), dtype=torch.int64, device=scores.device)
    if rows:
        _route_kernel[(rows,)](
            scores, shares, chosen, position, scores.stride(0), experts,
            PADDED=triton.next_power_of_2(experts), COUNT=count, COUNT_PADDED=triton.next_power_of_2(count),
            RENORMALIZE=renormalize, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return shares, chosen


@triton.jit(do_not_specialize=["limit"])
def _piece_kernel(logits, values, places, stride, size, limit, pieces, PIECE: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    x = tl.where(at < limit, x, float("-inf"))
    best = tl.max(x, axis=0)
    place = tl.min(tl.where(x == best, at, 2147483647), axis=0)
    tl.store(values + row * pieces + piece, tl.where(bad, float("inf"), best))
    tl.store(places + row * pieces + piece, place)


@triton.jit(do_not_specialize=["pieces"])
def _best_kernel(values, places, out, pieces, PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    value = tl.load(values + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    place = tl.load(places + row * pieces + piece, mask=piece < pieces, other=2147483647)
    best = tl.max(value, axis=0)
    first = tl.min(tl.where(value == best, place, 2147483647), axis=0)
    sound = (best != float("inf")) & (best != float("-inf"))
    tl.store(out + row, tl.where(sound, first, -1).to(tl.int64))


@triton.jit
def _route_kernel(
    scores, shares, chosen, position, stride, experts,
    PADDED: tl.constexpr, COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    x = tl.load(scores + row * stride + e, mask=e < experts, other=float("-inf"))
    odds = tl.where(e < experts, exp(x - tl.max(x, axis=0)), 0.0)
    odds = tl.div_rn(odds, tree_sum(odds, PADDED) + tl.zeros_like(odds))
    place = tl.arange(0, COUNT_PADDED)
    share = tl.zeros((COUNT_PADDED,), tl.float32)
    left = tl.where(e < experts, odds, -1.0)
    for i in tl.static_range(0, COUNT):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, e, PADDED - 1), axis=0)
        # A NaN is nowhere the largest; it makes every share NaN, whichever expert stands beside it.
        share = tl.where(place == i, tl.sum(tl.where(e == at, odds, 0.0), axis=0), share)
        number = tl.minimum(at, experts - 1)
        if position is not None:
            number = tl.where(tl.load(position + row) < 0, -1, number)
        tl.store(chosen + row * COUNT + i, number.to(tl.int64))
        left = tl.where(e == at, -1.0, left)
    if RENORMALIZE:
        share = tl.div_rn(share, tree_sum(share, COUNT_PADDED) + tl.zeros_like(share))
    tl.store(shares + row * COUNT + place, share, mask=place < COUNT)
