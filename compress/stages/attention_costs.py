"""What errors of attention's scores and values do to a layer's output: what a cache's rounding is to keep small."""

import torch
from torch import Tensor

from runtime.kernels.reference import capped
from runtime.model.layers import Attention
from runtime.model.reference import LlamaDecoder


@torch.inference_mode()
def output_costs(decoder: LlamaDecoder, layer: int) -> Tensor:
    """(heads, v, v): an error e of a query head's mixed values adds √(eᵀ · cost · e) to the layer's output. Gates count
    as what they are at 0."""
    a, weights = decoder.architecture, decoder.parts.blocks[layer].attention
    assert isinstance(weights, Attention)  # `check`
    size = a.shape(layer)[1] if a.latent is None else a.value_dim
    costs = torch.empty(a.heads, size, size)
    for head in range(a.heads):
        mixed = torch.zeros(size, a.heads, size)
        mixed[:, head] = torch.eye(size)
        reached = decoder.output(mixed, weights, torch.zeros(size, a.hidden))
        costs[head] = reached @ reached.T
    return costs


def score_costs(
    q: Tensor, k: Tensor, v: Tensor, costs: Tensor, decoder: LlamaDecoder, weights: Attention, seen: Tensor | None
) -> Tensor:
    """(T, heads): what an error of 1 in one of a query's scores adds to the layer's output, squared and summed over the
    scores.

    q      (T, heads, d); k (T, kv_heads, d), v (T, kv_heads, v) float32 of one text.
    costs  (heads, v, v), see `output_costs`.
    seen   (T, T) bool, which keys a row sees; None: all up to its own.

    An error δ of the score of key j moves what is mixed, Σ p v = o, by p[j] · (v[j] − o) · δ, to first order. So a
    query whose keys share its attention evenly, or that reads one key alone, has little to fear. Memory: a few times
    T² floats.
    """
    a, per = decoder.architecture, q.shape[1] // k.shape[1]
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril() if seen is None else seen
    out = torch.empty(q.shape[:2])
    for head in range(q.shape[1]):
        keys, values, cost = k[:, head // per], v[:, head // per], costs[head]
        scores = q[:, head] @ keys.T * a.scaling
        slope: Tensor | float = 1.0
        if a.softcap:
            scores = capped(scores, a.softcap)
            slope = 1 - (scores / a.softcap).square()
        scores = scores.masked_fill(~visible, float("-inf"))
        if weights.sinks is not None:
            scores = torch.cat((scores, weights.sinks[head].expand(len(scores), 1)), dim=1)
        shares = torch.softmax(scores, dim=1)[:, : len(keys)]
        mixed = shares @ values
        own, reached = ((values @ cost) * values).sum(1), mixed @ cost
        apart = own + (reached * mixed).sum(1, keepdim=True) - 2 * reached @ values.T
        out[:, head] = ((shares * slope).square() * apart.clamp_min(0)).sum(1)
    return out
