"""What attention reads of a text, layer by layer: keys as a cache takes them, and the queries that they meet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compress.stages.attention_costs import output_costs, score_costs
from runtime.checkpoints.record import HeadShape
from runtime.kernels.reference import capped, first_seen
from runtime.model.layers import Attention
from runtime.model.reference import LlamaDecoder


@dataclass(frozen=True)
class Heads:
    """What a layer's attention saw on all windows, float32.

    keys     (tokens, kv_heads, d), as the cache takes them: after rotation.
    moments  (kv_heads, d, d), the mean of q qᵀ over the queries of each head's group; each by what an error of its
             scores does to the layer's output, where that was asked for (attention_costs.score_costs).
    mixing   (kv_heads, v, v), what an error of a mixed value does to it, the mean over the group; where asked for.
    values   (kv_heads,), the largest |value|.
    value_rows  (tokens, kv_heads, v).
    """

    keys: Tensor
    moments: Tensor
    values: Tensor
    value_rows: Tensor
    mixing: Tensor | None = None


@torch.inference_mode()
def attention_inputs(
    decoder: LlamaDecoder, windows: Tensor, starts: Sequence[int] | None = None, costs: bool = False
) -> Iterator[tuple[int, Heads]]:
    """Runs windows (W, L) int64 through the decoder, a block at a time, and yields what attention saw of the keys of
    each layer that has some, with the layer's number: once all layers have read them.

    starts  where keys and queries of each window are turned as if it began there; None: at 0.
    costs   whether errors count by what they do to the layers' outputs.

    Memory, in floats: of all windows the residual stream (W · L · hidden), the blocks' own inputs (W · L · layers ·
    size) and the keys and values of one layer, and of those that later layers share (W · L · 2 · kv_heads · d each);
    of one window the activations of one block.
    """
    a = decoder.architecture
    places = torch.arange(windows.shape[1])
    turns = [decoder.turns(places + start) for start in starts or [0] * len(windows)]
    stream = [decoder.embed(window, places) for window in windows]
    own = [decoder.layer_inputs(window, x) for window, x in zip(windows, stream, strict=True)]
    last = {a.source(number): number for number in range(a.layers)}
    held: dict[int, _Seen] = {}
    for number, block in enumerate(decoder.parts.blocks):
        weights, source = block.attention, a.source(number)
        assert isinstance(weights, Attention)  # `check`
        if source == number:
            held[source] = _Seen(a.shape(source))
        found, seen = held[source], _visible(windows.shape[1], weights.window, a.chunked)
        of = output_costs(decoder, number) if costs else None
        if of is not None:
            found.reach(of)
        for index, x in enumerate(stream):
            read = decoder.normed(x, block.input_norm)
            q, k, v = decoder.project(read, weights, turns[index])
            if source == number:
                found.keep(k, v)
            k, v = found.keys[index], found.values[index]
            if of is not None:
                q_costs = score_costs(q, k, v, of, decoder, weights, seen)
                found.count(q * q_costs.sqrt().unsqueeze(-1))
            else:
                found.count(q)
            mixed = _mixed(q, k, v, decoder, weights, seen)
            out = decoder.output(mixed.transpose(0, 1), weights, read)
            inputs = own[index]
            stream[index] = decoder.behind(x, out, block, None if inputs is None else inputs[:, number])
        if last[source] == number:
            yield source, held.pop(source).heads()


class _Seen:
    """What is known of a layer's keys so far: those of each window, their values, and the queries that read them."""

    def __init__(self, shape: HeadShape):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._kv_heads, self._dim = shape
        self._moments = torch.zeros(self._kv_heads, self._dim, self._dim)
        self._windows = 0
        self._mixing: Tensor | None = None

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """A window's keys and values (L, kv_heads, d)."""
        self.keys.append(keys)
        self.values.append(values)

    def reach(self, costs: Tensor) -> None:
        """What errors of the mixed values of a layer that reads them cost (heads, v, v)."""
        own = costs.unflatten(0, (self._kv_heads, -1)).mean(1)
        self._mixing = own if self._mixing is None else self._mixing + own

    def count(self, q: Tensor) -> None:
        """A window's queries (L, heads, d)."""
        grouped = q.view(len(q), self._kv_heads, -1, self._dim).transpose(0, 1).flatten(1, 2)
        self._moments += grouped.transpose(1, 2) @ grouped / grouped.shape[1]
        self._windows += 1

    def heads(self) -> Heads:
        """All of it."""
        highest = torch.stack([values.abs().amax((0, 2)) for values in self.values]).amax(0)
        return Heads(torch.cat(self.keys), self._moments / self._windows, highest, torch.cat(self.values), self._mixing)


def _mixed(q: Tensor, k: Tensor, v: Tensor, decoder: LlamaDecoder, weights: Attention, seen: Tensor | None) -> Tensor:
    """Attention (heads, T, d) of one window, in torch's own order of sums."""
    a = decoder.architecture
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    if not (a.softcap or a.sinks):
        how: dict[str, Any] = {"attn_mask": seen, "is_causal": seen is None, "scale": a.scaling, "enable_gqa": True}
        return scaled_dot_product_attention(q[None], k[None], v[None], **how)[0]
    per = a.heads // a.kv_heads
    k, v = k.repeat_interleave(per, 0), v.repeat_interleave(per, 0)
    scores = q @ k.transpose(1, 2) * a.scaling
    scores = capped(scores, a.softcap) if a.softcap else scores
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril() if seen is None else seen
    scores = scores.masked_fill(~causal, float("-inf"))
    if weights.sinks is not None:
        scores = torch.cat((scores, weights.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=2)
    return torch.softmax(scores, dim=-1)[..., : k.shape[1]] @ v


def _visible(length: int, window: int | None, chunked: bool) -> Tensor | None:
    """(length, length) bool, which keys a row sees; None: all up to its own."""
    if window is None or window >= length:
        return None
    at = torch.arange(length)
    return (first_seen(at, window, chunked)[:, None] <= at) & (at <= at[:, None])
