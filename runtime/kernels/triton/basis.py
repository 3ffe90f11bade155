"""Keys and values in the basis of their head on the device, with the bits of runtime/kernels/basis.py.

Kernels that use this are compiled without fused products (enable_fp_fusion=False).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.basis import BACK, TRIED
from runtime.kernels.triton.exact import nearest
from runtime.kv_store import HALVES, SCALE_BITS

_HALVES, _TRIED = tl.constexpr(HALVES), tl.constexpr(TRIED)
_SHORT, _STEP = tl.constexpr(SCALE_BITS), tl.constexpr(1 << HALVES)


def turn_back(x: Tensor, basis: Tensor) -> Tensor:
    """x · back of x (T, heads, d) float32 contiguous, by the bases (kv_heads, 3, d, d) of a layer."""
    out = torch.empty_like(x)
    rows, heads, dim = x.shape
    if rows:
        _turn_kernel[(rows, heads)](
            x, basis, out, HEADS=heads, PER=heads // len(basis), DIM=dim, PADDED=triton.next_power_of_2(dim),
            PART=BACK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _turn_kernel(
    x, basis, out,
    HEADS: tl.constexpr, PER: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    matrix = basis + ((head // PER).to(tl.int64) * 3 + PART) * DIM * DIM
    at, d = (row * HEADS + head) * DIM, tl.arange(0, PADDED)
    tl.store(out + at + d, turned_memory(x + at, matrix, d, d < DIM, DIM, PADDED), mask=d < DIM)


@triton.jit
def turned_memory(source, matrix, d, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Entries d (PADDED,) of x · matrix, of x (DIM,) in memory; 0 where not `real`."""
    out = tl.zeros((PADDED,), tl.float32)
    for j in range(DIM):
        out += tl.load(source + j) * tl.load(matrix + j * DIM + d, mask=real, other=0.0)
    return out


@triton.jit
def turned_registers(x, matrix, d, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The same of x (PADDED,) as it is held, entry by entry."""
    out = tl.zeros((PADDED,), tl.float32)
    for j in range(DIM):
        out += tl.sum(tl.where(d == j, x, 0.0), axis=0) * tl.load(matrix + j * DIM + d, mask=real, other=0.0)
    return out


@triton.jit
def rounded_signed(x, real, LIMIT: tl.constexpr, HALF: tl.constexpr):
    """round_signed of one row (one-dimensional, `real` entries only): codes as float32, and the scale."""
    scale = tl.div_rn(_extreme(x, real), LIMIT)
    return _within(nearest(tl.where(real, x * _inverse(scale), 0.0)), -HALF, HALF - 1), scale


@triton.jit
def rounded_in_basis(x, d, real, feedback, CACHE: tl.constexpr):
    """round_in_basis of one row that is in the basis, whose entry d stands where `d` says (`real` entries only): codes
    without halves as float32, and the scale with them. feedback (DIM, DIM).
    CACHE is a kv_store.Written."""
    longest = tl.div_rn(_extreme(x, real), CACHE.basis_limit).to(tl.int32, bitcast=True)
    infinite: tl.constexpr = 0x7F800000
    cut = ((longest & (_STEP - 1)) != 0) & ((longest & infinite) != infinite)
    first = (longest + tl.where(cut, _STEP, 0)) & _SHORT
    code, least = _coded(x, d, real, first.to(tl.float32, bitcast=True), feedback, CACHE)
    best = first
    for tried in tl.static_range(1, _TRIED):
        kept = ((first & infinite) == infinite) | ((first & 0x7FFFFFFF) < tried * _STEP)
        word = tl.where(kept, first, first - tried * _STEP)
        found, cost = _coded(x, d, real, word.to(tl.float32, bitcast=True), feedback, CACHE)
        better = cost < least
        code = tl.where(better, found, code)
        best = tl.where(better, word, best)
        least = tl.where(better, cost, least)
    whole = tl.floor(code)
    fine = real & (d < _HALVES) & (code != whole)
    halves = tl.sum(tl.where(fine, 1 << tl.where(fine, d, 0), 0), axis=0)
    return whole, (best | halves).to(tl.float32, bitcast=True)


@triton.jit
def _coded(x, d, real, scale, feedback, CACHE: tl.constexpr):
    """Codes of one row by a scale, halves among them, as float32; and what they lose."""
    open_ = tl.where(real, x * _inverse(scale), 0.0)
    left = open_
    code = tl.zeros_like(open_)
    cost = scale * 0.0
    for n in range(CACHE.dim):
        i = CACHE.dim - 1 - n
        here = real & (d == i)
        fine = tl.where(i < _HALVES, 2.0, 1.0)
        # Not a division, which is approximate here.
        step = tl.where(i < _HALVES, 0.5, 1.0)
        wanted = tl.sum(tl.where(here, left, 0.0), axis=0)
        inner = (wanted + _clamped(wanted, CACHE.knee)) * 0.5
        whole = _within(nearest(inner * fine), -CACHE.half * fine, CACHE.half * fine - 1.0)
        own = whole * step
        nearer = tl.where(whole > 0.0, whole - 1.0, tl.where(whole < 0.0, whole + 1.0, whole)) * step
        missed, beside = wanted - level(own, CACHE.knee), wanted - level(nearer, CACHE.knee)
        # Where steps change, the code before it may be the nearest.
        before = tl.abs(beside) < tl.abs(missed)
        own = tl.where(before, nearer, own)
        missed = tl.where(before, beside, missed) * fine
        cost += missed * missed
        lost = tl.sum(tl.where(here, open_, 0.0), axis=0) - level(own, CACHE.knee)
        code = tl.where(here, own, code)
        left += lost * tl.load(feedback + i * CACHE.dim + d, mask=real & (d < i), other=0.0)
    return code, cost * (scale * scale)


@triton.jit
def _clamped(x, KNEE: tl.constexpr):
    return tl.where(x < -KNEE, -KNEE, tl.where(x > KNEE, KNEE, x))


@triton.jit
def level(codes, KNEE: tl.constexpr):
    """What codes, halves among them, stand for, over their scale; exact, in float16 too."""
    return codes + (codes - _clamped(codes, KNEE).to(codes.dtype))


@triton.jit
def short_scale(scale):
    """A scale without the bits of codes in it (kv_store.scale_of)."""
    return (scale.to(tl.int32, bitcast=True) & _SHORT).to(tl.float32, bitcast=True)


@triton.jit
def halves_of(scale, d):
    """What codes of dimensions d have beside what is stored of them, 0 or 0.5 in float16; `scale` has d's shape or is
    broadcast to it."""
    bit = scale.to(tl.int32, bitcast=True) >> tl.minimum(d, _HALVES)
    return tl.where(d < _HALVES, (bit & 1).to(tl.float16) * 0.5, 0.0).to(tl.float16)


@triton.jit
def _extreme(x, real):
    """The entry of largest magnitude, of two the positive one; NaN where one is."""
    bad = tl.max((real & (x != x)).to(tl.int32), axis=0) > 0
    highest = tl.maximum(tl.max(tl.where(real, x, 0.0), axis=0), 0.0)
    lowest = tl.minimum(tl.min(tl.where(real, x, 0.0), axis=0), 0.0)
    return tl.where(bad, float("nan"), tl.where(highest >= -lowest, highest, lowest))


@triton.jit
def _inverse(scale):
    inverse = tl.where(scale != 0.0, tl.div_rn(1.0, scale), 0.0)
    return tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)


@triton.jit
def _within(code, bottom, top):
    """A code bottom..top; 0 for NaN."""
    code = tl.where(code < bottom, bottom, tl.where(code > top, top, code))
    return tl.where(code == code, code, 0.0)
