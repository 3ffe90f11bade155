"""Latent attention on the device: what a row's query and a token's vector are before the cache and behind it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.checkpoints.mixers import Latent
from runtime.kernels.joined import Linear
from runtime.kernels.triton.elementwise import rms_norm
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonLinear
from runtime.model.layers import HeadStack, LatentHeads
from runtime.model.triton.cache import WIDEST
from runtime.model.triton.experts import StackedLinear, alike, stack


def of_latent(q: Tensor, token: Tensor, weights: LatentHeads, how: Latent, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (T, heads · d) against what the cache holds of a token, its key (T, d) and its value (T, rank), float32;
    the first `rotated` dimensions of a query and of a key are not rotated yet.

    q  (T, heads · (rotated + plain)), or the vector of queries; token (T, rotated + rank): of weights.qkv.
    """
    if weights.query is not None and weights.query_norm is not None:
        q = weights.query(rms_norm(q, weights.query_norm.weight, how.norm_eps))
    each = q.view(len(q), heads, how.rotated + how.plain)
    against = by_head(weights.keys, weights.keys_stack, each[..., how.rotated :])
    vector = rms_norm(token[:, how.rotated :], weights.norm.weight, how.norm_eps)
    q = torch.cat((each[..., : how.rotated], against), dim=-1).flatten(1)
    return q, torch.cat((token[:, : how.rotated], vector), dim=1), vector


def by_head(layers: tuple[Linear, ...], whole: HeadStack | None, x: Tensor) -> Tensor:
    """Each head's layer of its part of x (T, heads, K) float32: (T, heads, N). Few rows go through the stack at once,
    those of a prompt through layer after layer, each of which multiplies them in wide tiles: the same bits."""
    if whole is not None and len(x) <= WIDEST:
        return whole(x)
    return torch.stack([layer(x[:, head].contiguous()) for head, layer in enumerate(layers)], dim=1)


@dataclass(frozen=True, eq=False)
class StackedHeads:
    """A layer of each head in one stack: a mixture's kernels, every row of which picks all experts in their order."""

    layer: StackedLinear
    heads: int

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, heads, K) float32: (T, heads, N) float32."""
        rows = len(x)
        picks = Picks(torch.arange(self.heads, device=x.device).expand(rows, -1).contiguous())
        return self.layer(x.reshape(rows * self.heads, -1), picks).view(rows, self.heads, -1)


def stacked(weights: LatentHeads) -> LatentHeads:
    """The layers of all heads as stacks beside views of them; as they are where a library multiplies some."""
    keys, keys_stack = _stacked(weights.keys)
    values, values_stack = _stacked(weights.values)
    return replace(weights, keys=keys, values=values, keys_stack=keys_stack, values_stack=values_stack)


def _stacked(layers: tuple[Linear, ...]) -> tuple[tuple[Linear, ...], StackedHeads | None]:
    ours = [layer for layer in layers if isinstance(layer, TritonLinear)]
    if len(ours) < len(layers) or not alike(ours):
        return layers, None
    whole, views = stack(ours)
    return tuple(views), StackedHeads(whole, len(views))
