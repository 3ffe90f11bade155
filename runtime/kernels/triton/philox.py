"""The position-keyed random numbers of runtime/sampling/noise.py, made on the device: the same bits.

Philox with four words of 64 bits and ten rounds (Salmon et al., SC 2011), as numpy counts: the first block of a stream
is that of its counter plus one, and a block gives its four words in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
# Multipliers and the steps of the key, from the paper.
_M0, _M1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_W0, _W1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


def uniforms(keys: Tensor, count: int, stream: int) -> Tensor:
    """noise.uniforms for several keys: (n, count) float64 in (0, 1).

    keys    (n, 2) int64: seed and position; a seed above 2**63 as the negative number of the same bits.
    stream  0 or more, as noise.Stream numbers them; the lane is 0.
    """
    rows = keys.shape[0]
    out = torch.empty((rows, count), dtype=torch.float64, device=keys.device)
    if rows and count:
        _uniforms[(rows, triton.cdiv(count, 4 * _BLOCK))](keys, out, count, stream, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["count", "stream"])
def _uniforms(keys, out, count, stream, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = tl.program_id(0), tl.program_id(1)
    number = part * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), dtype=tl.uint64)
    k0 = zero + tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
    k1 = zero + tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
    # numpy steps the counter before it makes a block.
    c0 = number.to(tl.uint64) + 1
    c1, c2 = zero, zero
    c3 = zero + stream.to(tl.uint64)
    m0, m1 = zero + _M0, zero + _M1
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += _W0
        k1 += _W1
    base = out + row.to(tl.int64) * count
    at = number.to(tl.int64) * 4
    tl.store(base + at, _open_interval(c0), at < count)
    tl.store(base + at + 1, _open_interval(c1), at + 1 < count)
    tl.store(base + at + 2, _open_interval(c2), at + 2 < count)
    tl.store(base + at + 3, _open_interval(c3), at + 3 < count)


@triton.jit
def _open_interval(words):  # type: ignore[no-untyped-def]
    """52 bits and a half step, as noise.by_numpy: each k · 2⁻⁵² + 2⁻⁵³ is exact in float64."""
    return (words >> 12).to(tl.float64) * 2.220446049250313e-16 + 1.1102230246251565e-16
