"""The decoder that says what the others mean: what the record says, over packed weights, in plain torch.

One forward serves prefill, decoding, verification and batches of them.
Every intermediate value of a row is a function of that row and of the keys before it, in a fixed order of operations,
so its bits are the same whatever shares the call (kernels/exact.py). Positions, not slots, say what a row sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import Layout, Reserved, checked_cache, extend_states, keys_and_values, lay_out, plan
from runtime.contract import Cache, Out, Rows
from runtime.kernels import plain_torch, reference
from runtime.kernels.activations import activate
from runtime.kernels.basis import BACK, turned
from runtime.kernels.exact import sigmoid
from runtime.kernels.joined import Joined
from runtime.kernels.routing import route
from runtime.model.base import BaseDecoder
from runtime.model.experts import sum_of_experts
from runtime.model.layers import Attention, Block, LatentHeads, Mixture, Mlp, Norm
from runtime.model.mixers import delta_rule, short_convolution, state_space
from runtime.model.state_layers import DeltaRule, ShortConvolution

# Tiles whose keys are gathered at once: bounds the copy of keys during prefill.
_TILES_AT_ONCE = 32


class Turns(NamedTuple):
    """Of a forward's rows: cos and sin (T, r/2) of each rotary table, and what queries are multiplied by, (T,)."""

    angles: tuple[tuple[Tensor, Tensor], ...]
    growth: Tensor | None


class LlamaDecoder(BaseDecoder):
    """A `Decoder` whose rows have the same bits at every width and on every machine."""

    attention = staticmethod(reference.attention)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises TypeError and ValueError as slots.checked_cache and slots.plan."""
        held = checked_cache(tokens, rows, cache, logits_at, self.architecture)
        if len(tokens) == 0:
            empty = self.parts.norm.weight.new_empty
            taken = empty((0, len(self.taps) * self.hidden_size)) if self.taps else None
            return Out(empty((0, self.vocab_size)), empty((0, self.hidden_size)), taken)
        self._recall_states(rows, held)
        layout = plan(rows, held)
        extend_states(layout.requests, tokens, held, logits_at)
        streams: list[Tensor] | None = [] if self.taps else None
        x = self._through_blocks(tokens, rows.position, layout, held, streams)
        if logits_at is not None:
            x = x[logits_at.to(self.device)]
        hidden = self.normed(x, self.parts.norm)
        taken = None if streams is None else torch.cat([streams[tap] for tap in self.taps], dim=1)
        return Out(self._logits(hidden), hidden, taken)

    @torch.inference_mode()
    def _run_again(self, tokens: Tensor, chain: Reserved, cache: KeyValueCache) -> None:
        rows = Rows.chains([(chain.request, chain.start, chain.count)])
        self._through_blocks(tokens, rows.position, lay_out(rows, [chain]), cache)

    def _through_blocks(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        cache: KeyValueCache,
        streams: list[Tensor] | None = None,
    ) -> Tensor:
        """The residual stream (T, hidden) behind the last block; `streams` gets it before and behind each one."""
        x = self.embed(tokens, positions)
        return self.behind_blocks(x, self.layer_inputs(tokens, x), positions, layout, cache, streams)

    def behind_blocks(
        self,
        x: Tensor,
        own: Tensor | None,
        positions: Tensor,
        layout: Layout,
        cache: KeyValueCache,
        streams: list[Tensor] | None = None,
    ) -> Tensor:
        """The same of what comes into the first block (T, hidden), and each block's own input, as `layer_inputs`."""
        a, turns = self.architecture, self.turns(positions)
        if streams is not None:
            streams.append(x)
        for number, (places, block) in enumerate(zip(a.places, self.parts.blocks, strict=True)):
            normed, mixed, spaced = self.normed(x, block.input_norm), None, None
            if block.mamba is not None:
                assert a.mamba is not None
                spaced = state_space(normed, block.mamba, a.mamba, a.norm_eps, places[1], layout, cache)
            if block.attention is not None:
                mixed = self._mixed(normed, block.attention, places, layout, cache, turns)
            x = self.behind(x, mixed, block, None if own is None else own[:, number], spaced)
            if streams is not None:
                streams.append(x)
        return x

    def behind(
        self, x: Tensor, mixed: Tensor | None, block: Block, own: Tensor | None, spaced: Tensor | None = None
    ) -> Tensor:
        """The residual stream behind a block, of what comes into it, what its mixer adds, and its own input.

        spaced  what a state space adds, before what stands in attention's place.
        """
        a, after = self.architecture, x
        if spaced is not None:
            assert a.mamba is not None
            after = self.add(after, spaced, None, a.mamba.added)
        if mixed is not None:
            after = self.add(after, mixed, block.attention_norm, a.attention_scales[1])
        if block.mlp is not None:
            added = self.feed_forward(x if a.parallel else after, block)
            after = self.add(after, added, block.output_norm, a.mlp_scales[1])
        if block.own is not None and own is not None:
            gated = activate(a.activation, block.own.gate(after), own)
            after = self.add(after, block.own.out(gated), block.own.norm)
        return after if block.scale == 1.0 else after * block.scale

    def _mixed(
        self,
        x: Tensor,
        mixer: Attention | ShortConvolution | DeltaRule,
        places: tuple[int, int],
        layout: Layout,
        cache: KeyValueCache,
        turns: Turns,
    ) -> Tensor:
        """What stands in attention's place makes of normed rows x (T, hidden); places: see record.Architecture."""
        a, (layer, state) = self.architecture, places
        if isinstance(mixer, ShortConvolution):
            return short_convolution(x, mixer, state, layout, cache)
        if isinstance(mixer, DeltaRule):
            assert a.delta is not None
            return delta_rule(x, mixer, a.delta, a.norm_eps, state, layout, cache)
        read = a.attention_scales[0]
        return self._attend(x if read == 1.0 else x * read, mixer, layer, layout, cache, turns)

    def turns(self, positions: Tensor) -> Turns:
        """What depends on the rows' positions alone."""
        growth = self._rotary.growth(int(positions.max())) if len(positions) else None
        return Turns(self._rotary.at(positions), None if growth is None else growth[positions.to(self.device)])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The residual stream (T, hidden) float32 before the first block, of tokens and positions (T,) int64."""
        assert self.parts.embedding is not None
        x = self.parts.embedding[tokens.to(self.device)].float()
        scale = self.architecture.embedding_scale
        x = x if scale == 1.0 else x * scale
        return x if self.parts.positions is None else x + self.parts.positions[positions.to(self.device)]

    def layer_inputs(self, tokens: Tensor, x: Tensor) -> Tensor | None:
        """Each block's own input, (T, layers, size) float32, of tokens (T,) int64 and their embedding x (T, hidden)."""
        a, parts = self.architecture, self.parts.layer_inputs
        if parts is None:
            return None
        shape = (len(x), a.layers, a.layer_input)
        made = self.normed((parts.projection(x) * a.hidden**-0.5).view(shape), parts.norm)
        rows = parts.table[tokens.to(self.device)].float() * a.layer_input**0.5
        return (made + rows.view(shape)) * 2**-0.5

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x (…, hidden) through a norm; as it is where there is none."""
        a = self.architecture
        if norm is None:
            return x
        if a.norm == "layer":
            return reference.layer_norm(x, norm.weight, norm.bias, a.norm_eps)
        return reference.rms_norm(x, norm.weight, a.norm_eps)

    def add(self, x: Tensor, y: Tensor, norm: Norm | None, own: float = 1.0) -> Tensor:
        """The residual stream x behind what a branch y of a block adds; own: the branch's multiplier."""
        y, scale = self.normed(y, norm), self.architecture.residual_scale * own
        return x + (y if scale == 1.0 else y * scale)

    def project(self, x: Tensor, weights: Attention, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, heads, head_dim), keys (T, kv_heads, head_dim) and values of normed x, as caches take them.

        No keys and values, (T, 0, head_dim), where the layer shares those of another.
        """
        a, count = self.architecture, x.shape[0]
        if weights.latent is None:
            parts = list(weights.qkv.split(x))
            q = parts[0].view(count, a.heads, -1)
            kv = [part.view(count, -1, q.shape[-1]) for part in parts[1:]]
            k, v = (kv[0], kv[-1]) if kv else (q[:, :0], q[:, :0])
        else:
            q, k, v = self._of_latent(x, weights.qkv, weights.latent)
        if not a.query_key_norm_rotated:
            q, k = self._norm_heads(q, weights.q_norm), self._norm_heads(k, weights.k_norm)
        if weights.rotary is not None:
            cos, sin = turns.angles[weights.rotary]
            q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
        if a.query_key_norm_rotated:
            q, k = self._norm_heads(q, weights.q_norm), self._norm_heads(k, weights.k_norm)
        v = self._norm_heads(v, weights.v_norm)
        return q if turns.growth is None or not weights.grows else q * turns.growth.view(-1, 1, 1), k, v

    def _of_latent(self, x: Tensor, qkv: Joined, weights: LatentHeads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries against a token's vector, that behind its shared key, and it alone; of normed rows x."""
        a, (q, token) = self.architecture, qkv.split(x)
        assert a.latent is not None
        eps, rotated, each = a.latent.norm_eps, a.latent.rotated, a.latent.rotated + a.latent.plain
        if weights.query is not None and weights.query_norm is not None:
            q = weights.query(reference.rms_norm(q, weights.query_norm.weight, eps))
        heads = q.view(len(q), a.heads, each)
        against = [keys(heads[:, h, rotated:].contiguous()) for h, keys in enumerate(weights.keys)]
        q = torch.cat((heads[..., :rotated], torch.stack(against, dim=1)), dim=-1)
        vector = reference.rms_norm(token[:, rotated:], weights.norm.weight, eps)
        k = torch.cat((token[:, :rotated], vector), dim=-1)
        return q, k.unsqueeze(1), vector.unsqueeze(1)

    def output(self, mixed: Tensor, weights: Attention, x: Tensor) -> Tensor:
        """What attention adds, of the mixed values (T, heads, value_dim) of its heads, and the rows x that it read."""
        if weights.latent is not None:
            each = [values(mixed[:, h].contiguous()) for h, values in enumerate(weights.latent.values)]
            mixed = torch.stack(each, dim=1)
        mixed = mixed.reshape(len(mixed), -1)
        if weights.gate is not None:
            gates = sigmoid(weights.gate(x))
            mixed = (mixed.view(*gates.shape, -1) * gates.unsqueeze(-1)).flatten(1)
        return weights.out(mixed)

    def _norm_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Queries or keys (T, heads, d) normed head by head, or all heads of a row as one vector."""
        if weight is None:
            return x
        if self.architecture.query_key_span == "heads":
            return self.normed(x.flatten(1), Norm(weight)).view(x.shape)
        return self.normed(x, Norm(weight))

    def feed_forward(self, x: Tensor, block: Block) -> Tensor:
        """What a block's MLP, mixture or both make of the residual stream x (T, hidden)."""
        normed, mlp = self.normed(x, block.mlp_norm), block.mlp
        assert mlp is not None
        if isinstance(mlp, Mlp):
            return self._mlp(normed, mlp)
        if (beside := mlp.beside) is None:
            return self._mix(normed, normed, mlp)
        mixed = self._mix(self.normed(x, beside.input_norm), self.normed(x, beside.router_norm), mlp)
        dense = self.normed(self._mlp(normed, beside.mlp), beside.mlp_output_norm)
        return dense + self.normed(mixed, beside.output_norm)

    def _logits(self, hidden: Tensor) -> Tensor:
        a, logits = self.architecture, self.parts.head(hidden)
        logits = logits if a.logits_scale == 1.0 else logits * a.logits_scale
        return reference.capped(logits, a.final_softcap) if a.final_softcap else logits

    def _attend(
        self, x: Tensor, weights: Attention, layer: int, layout: Layout, cache: KeyValueCache, turns: Turns
    ) -> Tensor:
        a = self.architecture
        q, k, v = self.project(x, weights, turns)
        basis = cache.basis(layer)
        q = q if basis is None else turned(q, basis.keys[:, BACK])
        for of in layout.requests if not weights.shares else ():
            part = slice(of.first, of.first + of.count)
            cache.write(layer, of.request, of.start, k[part], v[part])
        out = []
        for begin in range(0, len(layout.owner), _TILES_AT_ONCE):
            tiles = range(begin, min(begin + _TILES_AT_ONCE, len(layout.owner)))
            keys, values = keys_and_values(layout, cache, layer, tiles)
            places = layout.gather[tiles.start : tiles.stop].to(self.device)
            positions = layout.positions[tiles.start : tiles.stop].to(self.device)
            how = weights.window, a.softcap, weights.sinks, a.chunked
            out.append(self.attention(q[places], keys, values, positions, a.scaling, *how))
        mixed = torch.cat(out).flatten(0, 1)[layout.scatter.to(self.device)]
        return self.output(mixed if basis is None else turned(mixed, basis.values[:, BACK]), weights, x)

    def _mlp(self, x: Tensor, weights: Mlp) -> Tensor:
        gate, *up = weights.gate_up.split(x)
        kind, scale = self.architecture.activation, self.architecture.mlp_scales[0]
        gate = gate if scale == 1.0 else gate * scale
        return weights.down(activate(kind, gate, up[0] if up else None, weights.parameters))

    def _mix(self, x: Tensor, routed: Tensor, weights: Mixture) -> Tensor:
        """Shares by the router, top k, each row's experts added in order of their number; then what all go through.

        x, routed  (T, hidden), what the experts and what the router read.
        """
        scale = None if weights.beside is None else weights.beside.expert_scale
        share, chosen = route(weights.router(routed), weights.how, weights.correction, scale)
        mixed = sum_of_experts(x, share, chosen, weights, self._mlp)
        if weights.shared is None:
            return mixed
        whole = self._mlp(x, weights.shared)
        return mixed + (whole if weights.shared_gate is None else whole * sigmoid(weights.shared_gate(x)))


class PlainTorchDecoder(LlamaDecoder):
    """The same by torch's own products: quicker, and other bits on another machine. Float layers are TiledLinear."""

    attention = staticmethod(plain_torch.attention)
