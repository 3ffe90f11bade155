"""The Llama family over packed weights: what all of its decoders have, and the one that says what they mean.

One forward serves prefill, decoding, verification and batches of them.
Every intermediate value of a row is a function of that row and of the keys before it, in a fixed order of operations,
so its bits are the same whatever shares the call (kernels/exact.py). Positions, not slots, say what a row sees.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from runtime.cache.contiguous import ContiguousCache, KeyValueCache
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import Layout, checked_cache, keys_and_values, plan
from runtime.checkpoints.architecture import Architecture
from runtime.contract import UNCALIBRATED, Cache, CacheKind, CacheScheme, Out, Rows
from runtime.kernels import plain_torch, reference
from runtime.kernels.dispatch import Kernel
from runtime.kernels.exact import exp, tree_sum
from runtime.model.layers import Attention, Block, Mixture, Mlp, Parts, upper_parts, weight_bytes
from runtime.model.rotary import RotaryTable

# Tiles whose keys are gathered at once: bounds the copy of keys during prefill.
_TILES_AT_ONCE = 32


class BaseDecoder(ABC):
    """A decoder on Specpress' own kernels: its weights as layers (`parts`), and the facts that every `Decoder` has.

    What drafts on the target's own weights (nested, medusa) takes any of these.
    """

    def __init__(
        self, architecture: Architecture, config: Any, parts: Parts, kernel: Kernel, kv: CacheScheme = UNCALIBRATED
    ):
        self.architecture, self.parts, self.kernel, self.kv = architecture, parts, kernel, kv
        self.vocab_size, self.hidden_size = architecture.vocab, architecture.hidden
        self.max_positions, self.exact, self.device = architecture.max_positions, kernel.exact, parts.norm.device
        self.kernels = kernel.name
        self._config, self._rotary = config, RotaryTable(config, self.device)

    @property
    def threads(self) -> int:
        """The native kernels' own; torch's where the kernels use those."""
        return self.kernel.threads or torch.get_num_threads()

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""
        return weight_bytes(self.parts)

    def upper(self) -> Self:
        """This decoder on the upper planes of its int8 weights (layers.py): no weights of its own, caches of its own.

        Raises UserError where it was not loaded with planes.
        """
        return type(self)(self.architecture, self._config, upper_parts(self.parts), self.kernel, self.kv)

    def new_cache(self, kind: CacheKind = "float32", pages: int | None = None) -> KeyValueCache:
        """An empty cache that holds keys and values as `kind` says, by the artifact's key factors (`kv`).

        `pages` of 64 tokens, shared by all requests (PagedCache); None: memory for each request (ContiguousCache).
        """
        form = self._cache_format(kind)
        return ContiguousCache(form) if pages is None else PagedCache(form, pages)

    def _cache_format(self, kind: CacheKind) -> CacheFormat:
        a = self.architecture
        return CacheFormat(a.layers, a.kv_heads, a.head_dim, self.device, kind, self.kv.factor(kind))

    @abstractmethod
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder."""


def sum_of_experts(
    x: Tensor, shares: Tensor, chosen: Tensor, experts: Sequence[Mlp], run: Callable[[Tensor, Mlp], Tensor]
) -> Tensor:
    """Each row's experts of x (T, hidden) times their shares (T, k), added in order of their number; float32.

    chosen (T, k) int64: experts' numbers, below 0: none. run: an expert's output of some rows. Waits for the device.
    """
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        at, place = (chosen == number).nonzero(as_tuple=True)
        if len(at):
            out[at] = out[at] + run(x[at], expert) * shares[at, place].unsqueeze(-1)
    return out


class LlamaDecoder(BaseDecoder):
    """A `Decoder` whose rows have the same bits at every width and on every machine."""

    attention = staticmethod(reference.attention)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises TypeError and ValueError as slots.checked_cache and slots.plan."""
        held = checked_cache(tokens, rows, cache, logits_at, self.architecture)
        if len(tokens) == 0:
            empty = self.parts.norm.new_empty
            return Out(empty((0, self.vocab_size)), empty((0, self.hidden_size)))
        layout = plan(rows, held)
        cos, sin = self._rotary.at(rows.position)
        a = self.architecture
        x = self.embed(tokens)
        for number, block in enumerate(self.parts.blocks):
            normed = reference.rms_norm(x, block.input_norm, a.norm_eps, a.norm_offset)
            x = x + self._attend(normed, block.attention, number, layout, held, cos, sin)
            x = x + self.feed_forward(x, block)
        if logits_at is not None:
            x = x[logits_at.to(self.device)]
        hidden = reference.rms_norm(x, self.parts.norm, a.norm_eps, a.norm_offset)
        return Out(self.parts.head(hidden), hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream (T, hidden) float32 before the first block, of tokens (T,) int64."""
        assert self.parts.embedding is not None
        x = self.parts.embedding[tokens.to(self.device)].float()
        scale = self.architecture.embedding_scale
        return x if scale == 1.0 else x * scale

    def project(self, x: Tensor, weights: Attention, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, heads, head_dim), keys and values (T, kv_heads, head_dim) of normed x, as the cache takes them.

        cos, sin  the rotary table at the rows' positions (RotaryTable.at).
        """
        a, count = self.architecture, x.shape[0]
        q, k, v = weights.qkv.split(x)
        q, k, v = q.view(count, a.heads, -1), k.view(count, a.kv_heads, -1), v.view(count, a.kv_heads, -1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = reference.rms_norm(q, weights.q_norm, a.norm_eps)
            k = reference.rms_norm(k, weights.k_norm, a.norm_eps)
        return reference.rotate(q, cos, sin), reference.rotate(k, cos, sin), v

    def feed_forward(self, x: Tensor, block: Block) -> Tensor:
        """What a block's MLP or mixture adds to the residual stream x (T, hidden)."""
        a, mlp = self.architecture, block.mlp
        normed = reference.rms_norm(x, block.mlp_norm, a.norm_eps, a.norm_offset)
        return self._mix(normed, mlp) if isinstance(mlp, Mixture) else self._mlp(normed, mlp)

    def _attend(
        self, x: Tensor, weights: Attention, layer: int, layout: Layout, cache: KeyValueCache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        a = self.architecture
        count = x.shape[0]
        q, k, v = self.project(x, weights, cos, sin)
        for of in layout.requests:
            part = slice(of.first, of.first + of.count)
            cache.write(layer, of.request, of.start, k[part], v[part])
        scaling = a.head_dim**-0.5
        out = []
        for begin in range(0, len(layout.owner), _TILES_AT_ONCE):
            tiles = range(begin, min(begin + _TILES_AT_ONCE, len(layout.owner)))
            keys, values = keys_and_values(layout, cache, layer, tiles)
            places = layout.gather[tiles.start : tiles.stop].to(self.device)
            positions = layout.positions[tiles.start : tiles.stop].to(self.device)
            out.append(self.attention(q[places], keys, values, positions, scaling, weights.window))
        mixed = torch.cat(out).flatten(0, 1)[layout.scatter.to(self.device)]
        return weights.out(mixed.reshape(count, -1))

    def _mlp(self, x: Tensor, weights: Mlp) -> Tensor:
        gate, up = weights.gate_up.split(x)
        act = reference.silu if self.architecture.activation == "silu" else reference.gelu_tanh
        return weights.down(act(gate) * up)

    def _mix(self, x: Tensor, weights: Mixture) -> Tensor:
        """Softmax over the router, top k, each row's experts added in order of their number."""
        scores = weights.router(x)
        odds = exp(scores - scores.amax(dim=-1, keepdim=True))
        odds = odds / tree_sum(odds).unsqueeze(-1)
        # Of equal ones the first, which torch's topk does not promise.
        share, chosen = (part[:, : weights.per_token] for part in odds.sort(dim=-1, descending=True, stable=True))
        if weights.renormalize:
            share = share / tree_sum(share).unsqueeze(-1)
        return sum_of_experts(x, share, chosen, weights.experts, self._mlp)


class PlainTorchDecoder(LlamaDecoder):
    """The same by torch's own products: quicker, and other bits on another machine. Float layers are TiledLinear."""

    attention = staticmethod(plain_torch.attention)
