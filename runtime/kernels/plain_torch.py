"""What `plain-torch` runs where it differs from reference.py: float products and attention by torch's matmul.

Many times quicker than fused sums, and a row's bits are the same at every width too (tiles.py); but their order is the
library's, so that they are other bits on another machine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.exact import exp, ordered_sum, tree_sum
from runtime.kernels.joined import HoldsTensors
from runtime.kernels.reference import capped, first_seen
from runtime.kernels.tiles import batched_product, lay_out, product
from runtime.kv_store import KEY_BLOCK


@dataclass(frozen=True)
class TiledLinear(HoldsTensors):
    """y = x Wᵀ + b. `weight` is (K, N), its inputs padded."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = product(x, self.weight)
        return y if self.bias is None else y + self.bias


def tiled_linear(weight: Tensor, bias: Tensor | None = None) -> TiledLinear:
    """A float layer from (N, K) of any float dtype."""
    return TiledLinear(lay_out(weight.float()), None if bias is None else bias.float())


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """What reference.attention does, in products of one cache block: all weights share a maximum."""
    tiles, rows, heads, d = q.shape
    of_value = values.shape[-1]
    blocks, kv_heads = keys.shape[1], keys.shape[2]
    per_kv = heads // kv_heads
    grouped = (q * scaling).view(tiles, rows, kv_heads, per_kv, d).transpose(1, 2).reshape(tiles, 1, kv_heads, -1, d)
    scores = batched_product(grouped, keys.transpose(-1, -2))
    scores = scores.view(tiles, blocks, kv_heads, rows, per_kv, KEY_BLOCK)
    if softcap:
        scores = capped(scores, softcap)
    at = torch.arange(blocks * KEY_BLOCK, device=q.device).view(1, blocks, 1, 1, 1, KEY_BLOCK)
    last = positions.view(tiles, 1, 1, rows, 1, 1)
    seen = (first_seen(last, window, chunked) <= at) & (at <= last)
    scores = torch.where(seen, scores, torch.full_like(scores, float("-inf")))
    highest = scores.amax(dim=(1, 5), keepdim=True)
    if sinks is not None:
        sinks = sinks.view(1, 1, kv_heads, 1, per_kv, 1)
        highest = torch.maximum(highest, sinks)
    weights = exp(scores - highest)
    total = ordered_sum(tree_sum(weights).transpose(0, 1))
    if sinks is not None:
        total = total + exp(sinks - highest).view(total.shape)
    mixed = batched_product(weights.view(tiles, blocks, kv_heads, rows * per_kv, KEY_BLOCK), values)
    out = ordered_sum(mixed.transpose(0, 1)).view(tiles, kv_heads, rows, per_kv, of_value) / total.unsqueeze(-1)
    return out.transpose(1, 2).reshape(tiles, rows, heads, of_value)
