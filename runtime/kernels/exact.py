"""Arithmetic whose result depends on the values alone: not on how many rows stand beside them.

Vectorised library functions treat the last few elements of an array with other code, and matrix products pick their
loop by the shape, so the same row can come out different in its last bits when more rows share the call. Here every
transcendental is built from operations that IEEE 754 rounds exactly, every sum has one order, and every float product
has one shape. It is slow, and it is the meaning of the fast kernels.
"""

from functools import cache

import torch
from torch import Tensor

# Rows of one float product: wide enough to verify a draft of seven in one call, narrow enough not to slow width 1.
TILE = 8
# Floats of a cache line.
_LINE = 16
# Draws of `tiles_are_fair`.
_TRIES = 3

_LOG2E = 1.4426950408889634
# ln 2 split so that k · _LN2_HIGH is exact for |k| < 2^11 (Cody and Waite).
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax coefficients of (e^r − 1 − r) / r² on |r| ≤ ln 2 / 2, highest power first (Cephes' expf).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOWEST, _EXP_HIGHEST = -87.3, 88.3


def exp(x: Tensor) -> Tensor:
    """e^x for float32, within 2 units in the last place; 0 below −87.3, and x is capped at 88.3."""
    clipped = x.clamp(_EXP_LOWEST, _EXP_HIGHEST)
    k = torch.floor(clipped * _LOG2E + 0.5)
    r = (clipped - k * _LN2_HIGH) - k * _LN2_LOW
    poly = r * _EXP[0]
    for coefficient in _EXP[1:-1]:
        poly = (poly + coefficient) * r
    poly = (poly + _EXP[-1]) * (r * r) + r + 1.0
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < _EXP_LOWEST, torch.zeros_like(x), poly * power)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x), float32."""
    return 1.0 / (1.0 + exp(-x))


def tanh(x: Tensor) -> Tensor:
    """1 − 2 / (e^2x + 1), float32; absolute error below 2e-7."""
    return 1.0 - 2.0 / (exp(2.0 * x) + 1.0)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: pad to a power of two, add the upper half to the lower, repeat."""
    size = x.shape[-1]
    width = 1 << max(0, size - 1).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension, first to last; a zero term changes nothing, so trailing ones are free."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total


def lay_out(weight: Tensor) -> Tensor:
    """(N, K) float32 as (K', N): the layout in which narrow products are twice as fast as in the file's.

    K is padded by zeros to a multiple of 16, so that every tile starts on a cache line.
    """
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % _LINE)).t().contiguous()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, K) times weight (K', N) from `lay_out`, float32, T of any size: (T, N).

    Always products of exactly `TILE` rows (the last filled up with zeros), or of one row where this machine's library
    lets a row's place in the tile change its bits.
    """
    rows, (inputs, outputs) = x.shape[0], weight.shape
    if rows == 0:
        return x.new_empty((0, outputs))
    tile = TILE if _fair(TILE, weight) else 1
    padded = torch.nn.functional.pad(x, (0, inputs - x.shape[1], 0, -rows % tile)).contiguous()
    out = [torch.mm(part, weight) for part in padded.split(tile)]
    return (out[0] if len(out) == 1 else torch.cat(out))[:rows]


def batched_product(x: Tensor, weights: Tensor) -> Tensor:
    """x (…, M, K) times weights (…, K, N), float32, leading dimensions broadcast: (…, M, N).

    M is the caller's tile: the same whatever shares the call. Rows go one by one where `product` would not tile them.
    Both are padded as `lay_out` pads, and copied: how operands lie in memory chooses a library's loops, too.
    """
    inputs, outputs = -x.shape[-1] % _LINE, -weights.shape[-1] % _LINE
    x = torch.nn.functional.pad(x, (0, inputs)).contiguous()
    padded = torch.nn.functional.pad(weights, (0, outputs, 0, inputs)).contiguous()
    tiles = (x,) if _fair(x.shape[-2], padded) else x.split(1, dim=-2)
    return torch.cat([torch.matmul(tile.contiguous(), padded) for tile in tiles], dim=-2)[..., : weights.shape[-1]]


def _fair(rows: int, weight: Tensor) -> bool:
    # How many threads share a product decides how it is cut up.
    return tiles_are_fair(*weight.shape[-2:], weight.device, torch.get_num_threads(), rows)


@cache
def tiles_are_fair(inputs: int, outputs: int, device: torch.device, threads: int, count: int = TILE) -> bool:
    """Whether a row gives the same bits at each of a tile's `count` places and beside any neighbours, for this shape,
    here.

    Tried once per shape, on rows whose numbers are of very different sizes: nearly every partial sum of them rounds, so
    that another order of the additions shows in nearly every product.
    """
    generator = torch.Generator().manual_seed(outputs * 65_537 + inputs)

    def draw(*shape: int) -> Tensor:
        sizes = torch.randint(-12, 13, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * 2.0**sizes).to(device)

    for _ in range(_TRIES):
        weight, rows = draw(inputs, outputs), draw(count, inputs)
        first = torch.mm(rows, weight)
        for shift in range(1, count):
            turned = torch.mm(rows.roll(shift, dims=0).contiguous(), weight)
            if not torch.equal(turned, first.roll(shift, dims=0)):
                return False
        for place in range(count):
            alone = torch.zeros_like(rows)
            alone[place] = rows[place]
            if not torch.equal(torch.mm(alone, weight)[place], first[place]):
                return False
    return True
