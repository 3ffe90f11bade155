"""Products by torch's own, whose bits do not depend on how many rows stand beside them: what `plain-torch` runs on.

Matrix products of a library pick their loop by the shape, so the same row can come out different in its last bits when
more rows share the call. Here every product has one shape. The order of its sums is the library's, on each machine its
own; kernels/fused.py has the one that is the same on all machines, and is many times slower in torch.
"""

from functools import cache

import torch
from torch import Tensor

from runtime.kernels.exact import TILE

# Floats of a cache line.
_LINE = 16
# Draws of `tiles_are_fair`.
_TRIES = 3


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
