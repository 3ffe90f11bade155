"""The layers of a forward over kernels in Triton: launches only, nothing that depends on what is computed.

The exception are prompts through a mixture, whose rows the host sends to their experts (`waits`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from runtime.checkpoints.record import Architecture
from runtime.kernels.activations import activate
from runtime.kernels.exact import sigmoid
from runtime.kernels.joined import Joined
from runtime.kernels.reference import layer_norm, rotate
from runtime.kernels.routing import route
from runtime.kernels.triton import argmax
from runtime.kernels.triton.attention_decode import Places, attend, workspace
from runtime.kernels.triton.attention_prefill import attend_many
from runtime.kernels.triton.attention_splits import splits_for
from runtime.kernels.triton.basis import turn_back
from runtime.kernels.triton.elementwise import embed, gated, rms_norm
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonJoined, TritonLinear, split_outputs
from runtime.kernels.triton.quantize_inputs import Rounded, gated_quantize, norm_quantize
from runtime.kernels.triton.rotary import rotate_and_store
from runtime.kernels.triton.row_states import Walk
from runtime.model.experts import sum_of_experts
from runtime.model.layers import Attention, Block, Linear, Mixture, Mlp, MlpBeside, Norm, Parts
from runtime.model.reference import Turns
from runtime.model.state_layers import ShortConvolution
from runtime.model.triton import states
from runtime.model.triton.batch import Inputs
from runtime.model.triton.cache import WIDEST
from runtime.model.triton.experts import StackedExperts
from runtime.model.triton.keys import Memory, heads_of, projected
from runtime.model.triton.latent import by_head
from runtime.model.triton.layer_inputs import layer_inputs

# Floats of the splits' results of attention that are held at once, and the rows that are attended to together at least.
_ROOM = 1 << 26
_LEAST_ROWS = 16


def hidden_states(
    parts: Parts,
    a: Architecture,
    inputs: Inputs,
    memory: Memory,
    turns: Turns,
    at: Tensor | None = None,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Final hidden states (T, hidden) float32 of a forward's rows, or of the rows `at` (n,) int64 on the device alone;
    and of all rows what contract.Out calls taken, (T, 0) without taps.

    Writes the rows' keys and values into the memory. turns: the rotary tables (P, r/2), and what queries grow by (P,),
    of all positions that occur.
    """
    assert parts.embedding is not None
    x = embed(inputs.token, parts.embedding, a.embedding_scale)
    position = inputs.position.clamp(min=0).long()
    if parts.positions is not None:
        x = x + parts.positions[position]
    own = layer_inputs(parts, a, inputs.token, x)
    splits = splits_for(memory.keys)
    of_layer = [heads_of(a, number) for number in range(a.layers)]
    widths = {heads.values: heads for heads in of_layer}
    # A model without attention has no heads.
    at_once = max(_LEAST_ROWS, _ROOM // max(1, a.heads * max(widths) * splits) // _LEAST_ROWS * _LEAST_ROWS)
    tail = inputs.tail if inputs.tail.shape[1] else None
    places = Places(inputs.table, inputs.request, inputs.position, inputs.start, tail)
    prompt = tail is None and len(x) > WIDEST  # many rows, in chains
    # Prompts walk their splits one after the other and need no room for them.
    count = min(len(x), at_once)
    rooms = {width: None if prompt else workspace(count, heads, splits, x.device) for width, heads in widths.items()}
    growth = None if turns.growth is None else turns.growth[position].view(-1, 1, 1)
    still = x.new_empty((len(x), 0))  # a rotary table of no dimensions

    def attention(read: Tensor, x: Tensor, block: Block, number: int) -> Tensor:
        """The residual stream x behind a block's attention, which reads `read`."""
        weights = block.attention
        assert isinstance(weights, Attention)
        store, layer, factor, basis = memory.of(a.places[number][0])
        of = of_layer[number]
        heads = replace(of, window=weights.window, sinks=weights.sinks, factor=factor, in_basis=basis is not None)
        normed = _normed(read, block.input_norm, weights.qkv, a, a.attention_scales[0])
        q, k, v = projected(_joined(weights.qkv, normed), weights, heads, a)
        angles, norms = (still, still), (weights.q_norm, weights.k_norm)
        if weights.rotary is not None:
            angles = turns.angles[weights.rotary]
        if not _in_kernel(weights, a):
            # What the kernel does not do between the product and the cache is done before it.
            if a.query_key_norm_rotated:
                here = angles[0][position], angles[1][position]
                q, k = (rotate(part.view(len(x), -1, heads.dim), *here).flatten(1) for part in (q, k))
                angles = still, still
            q, k = (_norm_heads(part, norm, heads.dim, a) for part, norm in zip((q, k), norms, strict=True))
            norms = None, None
        q = rotate_and_store(
            *(q, k, v, *angles, inputs.position, inputs.slot, store, layer, memory.kind, heads.dim, factor),
            *(*norms, a.norm_eps, basis),
        )
        q = q * growth if growth is not None and weights.grows else q
        q = q if basis is None else turn_back(q, basis.keys)
        mixed, room = q.new_empty((len(x), a.heads, heads.values)), rooms[heads.values]
        keys = (store, layer, memory.kind, heads)
        if prompt:
            attend_many(q, *keys, places, mixed)
        else:
            held = len(q) if room is None else len(room[0])
            for first in range(0, len(q), held):
                part = slice(first, first + held)
                attend(q[part], *keys, _some(places, part), splits, memory.sharing, mixed[part], room)
        mixed = mixed if basis is None else turn_back(mixed, basis.values)
        if weights.latent is not None:
            mixed = by_head(weights.latent.values, weights.latent.values_stack, mixed)
        mixed = mixed.view(len(x), -1)
        if weights.gate is not None:
            gates = weights.gate(_scaled(_norm(read, block.input_norm, a), a.attention_scales[0]))
            each = mixed.shape[1] // gates.shape[1]
            mixed = gated(gates if each == 1 else gates.repeat_interleave(each, 1), mixed, "sigmoid")
        return _branch(weights.out, mixed, x, block.attention_norm, a, a.attention_scales[1])

    streams = [x]
    for number, block in enumerate(parts.blocks):
        before = x
        x = _behind_states(x, block, a, inputs.walk, a.places[number][1])
        if isinstance(block.attention, Attention):
            x = attention(before, x, block, number)
        if block.mlp is not None:
            x = _feed_forward(before if a.parallel else x, x, block, a, inputs.position)
        if block.own is not None and own is not None:
            gated_input = _activated(block.own.gate(x), [own[:, number]], block.own.out, a)
            x = _branch(block.own.out, gated_input, x, block.own.norm, a)
        x = x if block.scale == 1.0 else x * block.scale
        if taps:
            streams.append(x)
    taken = torch.cat([streams[tap] for tap in taps], dim=1) if taps else x.new_empty((len(x), 0))
    if at is not None:
        x = x[at]
    return _norm(x, parts.norm, a), taken


def _behind_states(x: Tensor, block: Block, a: Architecture, walk: Walk, place: int) -> Tensor:
    """The residual stream x behind what carries a state in a block, if anything; place: its first float."""
    mixer, mamba = block.attention, block.mamba
    if mamba is not None:
        assert a.mamba is not None
        made = mamba.into(_scaled(_norm(x, block.input_norm, a), a.mamba.read))
        made = states.space(made, mamba, a.mamba, a.norm_eps, walk, place)
        return _branch(mamba.out, made, x, None, a, a.mamba.added)
    if mixer is None or isinstance(mixer, Attention):
        return x
    parts = _joined(mixer.qkv, _normed(x, block.input_norm, mixer.qkv, a))
    if isinstance(mixer, ShortConvolution):
        made = states.short_convolution(parts, mixer, walk, place)
    else:
        assert a.delta is not None
        made = states.delta_rule(parts, mixer, a.delta, a.norm_eps, walk, place)
    return _branch(mixer.out, made, x, block.attention_norm, a, a.attention_scales[1])


def _in_kernel(weights: Attention, a: Architecture) -> bool:
    """Whether rotate_and_store norms queries and keys as this model does."""
    plain = a.norm == "rms" and a.query_key_span == "head" and not a.query_key_norm_rotated
    return weights.q_norm is None or plain


def _norm_heads(x: Tensor, weight: Tensor | None, dim: int, a: Architecture) -> Tensor:
    """Queries or keys (T, heads · d), normed as query_key_span says."""
    assert weight is not None
    if a.query_key_span == "heads":
        return _norm(x, Norm(weight), a)
    heads = x.view(len(x), -1, dim)
    if a.norm == "layer":
        return layer_norm(heads, weight, None, a.norm_eps).flatten(1)
    return rms_norm(heads.reshape(-1, dim), weight, a.norm_eps).view(x.shape)


def _norm(x: Tensor, norm: Norm | None, a: Architecture) -> Tensor:
    """x (T, hidden) through a norm; as it is where there is none."""
    if norm is None:
        return x
    if a.norm == "layer":
        return layer_norm(x, norm.weight, norm.bias, a.norm_eps)
    return rms_norm(x, norm.weight, a.norm_eps)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _branch(
    layer: Linear, inputs: Rounded | Tensor, x: Tensor, after: Norm | None, a: Architecture, own: float = 1.0
) -> Tensor:
    """The residual stream x behind a branch of a block that ends in `layer`; own: the branch's multiplier."""
    if after is None and a.residual_scale * own == 1.0:
        return _added(layer, inputs, x)
    return _sum(x, _added(layer, inputs, torch.zeros_like(x)), after, a, own)


def _sum(x: Tensor, y: Tensor, after: Norm | None, a: Architecture, own: float = 1.0) -> Tensor:
    """The residual stream x behind what a branch y adds."""
    return x + _scaled(_norm(y, after, a), a.residual_scale * own)


def _some(places: Places, rows: slice) -> Places:
    """The places of some adjacent rows."""
    tail = None if places.tail is None else places.tail[rows]
    return Places(places.table, places.request[rows], places.position[rows], places.start[rows], tail)


def _feed_forward(read: Tensor, x: Tensor, block: Block, a: Architecture, position: Tensor) -> Tensor:
    """The residual stream x behind a block's MLP or mixture, which read `read`."""
    mlp, norm = block.mlp, block.mlp_norm
    assert mlp is not None  # as in `attention`
    if isinstance(mlp, Mixture) and mlp.beside is not None:
        return _sum(x, _beside(read, norm, mlp, mlp.beside, a, position), block.output_norm, a)
    if isinstance(mlp, Mixture):
        normed, own = _norm(read, norm, a), a.mlp_scales[1]
        if block.output_norm is None and a.residual_scale * own == 1.0:
            return _mix(x, normed, mlp, a, position)
        return _sum(x, _mix(torch.zeros_like(x), normed, mlp, a, position), block.output_norm, a, own)
    gate, *up = _joined(mlp.gate_up, _normed(read, norm, mlp.gate_up, a))
    made = _activated(_scaled(gate, a.mlp_scales[0]), up, mlp.down, a, mlp.parameters)
    return _branch(mlp.down, made, x, block.output_norm, a, a.mlp_scales[1])


def _beside(
    read: Tensor, norm: Norm | None, weights: Mixture, beside: MlpBeside, a: Architecture, position: Tensor
) -> Tensor:
    """What an MLP, behind `norm`, and the mixture beside it make of the residual stream."""
    dense = _mlp(read if norm is None else _norm(read, norm, a), beside.mlp, a)
    normed, routed = _norm(read, beside.input_norm, a), _norm(read, beside.router_norm, a)
    mixed = _mix(torch.zeros_like(read), normed, weights, a, position, routed)
    return _norm(dense, beside.mlp_output_norm, a) + _norm(mixed, beside.output_norm, a)


def _mlp(x: Tensor, mlp: Mlp, a: Architecture) -> Tensor:
    """An MLP or expert of x (T, hidden)."""
    gate, *up = _joined(mlp.gate_up, x)
    made = _activated(_scaled(gate, a.mlp_scales[0]), up, mlp.down, a, mlp.parameters)
    return _added(mlp.down, made, torch.zeros_like(x))


def _normed(x: Tensor, norm: Norm | None, reader: Joined, a: Architecture, read: float = 1.0) -> Rounded | Tensor:
    """x behind a norm as the layers that read it take it: rounded in the same kernel where one rounding serves them.

    read  multiplies it.
    """
    how = reader.how if isinstance(reader, TritonJoined) else None
    if norm is None or how is None or a.norm == "layer" or read != 1.0:
        return _scaled(_norm(x, norm, a), read)
    return norm_quantize(x, norm.weight, a.norm_eps, how)


def _joined(layers: Joined, inputs: Rounded | Tensor) -> tuple[Tensor, ...]:
    if isinstance(layers, TritonJoined):
        return split_outputs(layers.products(inputs), layers.sizes)
    assert isinstance(inputs, Tensor)
    return layers.split(inputs)


def _added(layer: Linear, inputs: Rounded | Tensor, x: Tensor) -> Tensor:
    """x plus the layer's output."""
    if not isinstance(layer, TritonLinear):
        return x + layer(inputs)  # type: ignore[arg-type]
    return layer.product(layer.round(inputs) if isinstance(inputs, Tensor) else inputs, residual=x)


def _activated(
    gate: Tensor, up: Sequence[Tensor], down: Linear, a: Architecture, parameters: Tensor | None = None
) -> Rounded | Tensor:
    """act(gate) · up as the layer `down` behind it takes it."""
    kind = a.activation
    if not up or kind not in ("silu", "gelu_tanh"):
        return activate(kind, gate, up[0] if up else None, parameters)
    if isinstance(down, TritonLinear) and down.how is not None:
        return gated_quantize(gate, up[0], kind, down.how)
    return gated(gate, up[0], kind)


def waits(parts: Parts, rows: int, a: Architecture) -> bool:
    """Whether the host must wait for the device within a forward of so many rows, which no graph can hold then."""
    mixtures = [block.mlp for block in parts.blocks if isinstance(block.mlp, Mixture)]
    return any(_by_host(mixture, rows, a) for mixture in mixtures)


def _by_host(weights: Mixture, rows: int, a: Architecture) -> bool:
    """Whether the host sends rows to their experts: those of a prompt, so that each expert multiplies all of its rows
    in wide tiles; and any where the experts are not alike, or do what their stack does not."""
    other = weights.how.scaled_inputs or a.mlp_scales[0] != 1.0
    return rows > WIDEST or weights.stacked is None or other


def _shares(weights: Mixture, scores: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The shares (T, k) of each row's experts and their numbers; below 0 in rows that are none."""
    how, beside = weights.how, weights.beside
    if how.scoring == "softmax" and weights.correction is None and how.groups[0] == 1:
        share, chosen = argmax.route(scores, how.per_token, how.renormalize, position)
        share = share if how.scale == 1.0 else share * how.scale
        # Rows that are none have some share of no expert.
        return share if beside is None else share * beside.expert_scale[chosen.clamp(min=0)], chosen
    share, best = route(scores, how, weights.correction, None if beside is None else beside.expert_scale)
    return share, torch.where(position.unsqueeze(1) < 0, -1, best)


def _mix(
    x: Tensor, normed: Tensor, weights: Mixture, a: Architecture, position: Tensor, routed: Tensor | None = None
) -> Tensor:
    """x plus each row's experts of normed x, added in order of their number, and what all rows go through.

    routed  what the router reads; None: what the experts read.
    """
    shares, chosen = _shares(weights, weights.router(normed if routed is None else routed), position)
    run = partial(_mlp, a=a)
    if weights.shared is not None:
        whole = run(normed, weights.shared)
        x = x + (whole if weights.shared_gate is None else whole * sigmoid(weights.shared_gate(normed)))
    if _by_host(weights, len(x), a):
        return x + sum_of_experts(normed, shares, chosen, weights, run)
    assert isinstance(weights.stacked, StackedExperts)
    return weights.stacked.mixed(normed, shares, Picks(chosen), a.activation, x)
