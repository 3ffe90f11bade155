"""The layers of a forward over kernels in Triton: launches only, nothing that depends on what is computed.

The exception are prompts through a mixture, whose rows the host sends to their experts (`waits`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoints.architecture import Architecture
from runtime.contract import CacheKind
from runtime.kernels.joined import Joined
from runtime.kernels.triton.argmax import route
from runtime.kernels.triton.attention_decode import Heads, Places, attend, splits_for, workspace
from runtime.kernels.triton.attention_prefill import attend_many
from runtime.kernels.triton.elementwise import embed, gated, rms_norm
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonJoined, TritonLinear, split_outputs
from runtime.kernels.triton.quantize_inputs import Rounded, gated_quantize, norm_quantize
from runtime.kernels.triton.rotary import rotate_and_store
from runtime.kv_store import Store
from runtime.model.layers import Block, Linear, Mixture, Mlp, Parts
from runtime.model.reference import sum_of_experts
from runtime.model.triton.batch import Inputs
from runtime.model.triton.cache import WIDEST
from runtime.model.triton.experts import StackedExperts

# Floats of the splits' results of attention that are held at once, and the rows that are attended to together at least.
_ROOM = 1 << 26
_LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Memory:
    """Where keys and values go: a pool of blocks of 64, how it holds them, and what keys are divided by.

    factor  (layers, kv_heads, head_dim) float32 or None.
    keys    the most keys that a row of this forward sees; sharing: adjacent rows of one request, most of the time.
    """

    store: Store
    kind: CacheKind
    factor: Tensor | None
    keys: int
    sharing: int


def hidden_states(
    parts: Parts,
    a: Architecture,
    inputs: Inputs,
    memory: Memory,
    angles: tuple[Tensor, Tensor],
    at: Tensor | None = None,
) -> Tensor:
    """Final hidden states (T, hidden) float32 of a forward's rows, or of the rows `at` (n,) int64 on the device alone.

    Writes the rows' keys and values into the memory. angles: the rotary tables (P, r/2) of all positions that occur.
    """
    assert parts.embedding is not None
    x = embed(inputs.token, parts.embedding, a.embedding_scale)
    splits = splits_for(memory.keys)
    heads = Heads(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5)
    at_once = max(_LEAST_ROWS, _ROOM // (a.heads * a.head_dim * splits) // _LEAST_ROWS * _LEAST_ROWS)
    tail = inputs.tail if inputs.tail.shape[1] else None
    places = Places(inputs.table, inputs.request, inputs.position, inputs.start, tail)
    prompt = tail is None and len(x) > WIDEST  # many rows, in chains
    # Prompts walk their splits one after the other and need no room for them.
    room = None if prompt else workspace(min(len(x), at_once), heads, splits, x.device)

    def attention(x: Tensor, block: Block, layer: int) -> Tensor:
        """The residual stream behind a block's attention."""
        weights = block.attention
        q, k, v = _joined(weights.qkv, _normed(x, block.input_norm, weights.qkv, a))
        factor = None if memory.factor is None else memory.factor[layer]
        q = rotate_and_store(
            *(q, k, v, *angles, inputs.position, inputs.slot, memory.store, layer, memory.kind, a.head_dim, factor),
            *(weights.q_norm, weights.k_norm, a.norm_eps),
        )
        mixed = torch.empty_like(q)
        own = Heads(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5, weights.window, factor)
        keys = (memory.store, layer, memory.kind, own)
        if prompt:
            attend_many(q, *keys, places, mixed)
        else:
            held = len(q) if room is None else len(room[0])
            for first in range(0, len(q), held):
                part = slice(first, first + held)
                attend(q[part], *keys, _some(places, part), splits, memory.sharing, mixed[part], room)
        return _added(weights.out, mixed.view(len(x), -1), x)

    for number, block in enumerate(parts.blocks):
        x = attention(x, block, number)
        x = _feed_forward(x, block, a, inputs.position)
    if at is not None:
        x = x[at]
    return rms_norm(x, parts.norm, a.norm_eps, a.norm_offset)


def _some(places: Places, rows: slice) -> Places:
    """The places of some adjacent rows."""
    tail = None if places.tail is None else places.tail[rows]
    return Places(places.table, places.request[rows], places.position[rows], places.start[rows], tail)


def _feed_forward(x: Tensor, block: Block, a: Architecture, position: Tensor) -> Tensor:
    """The residual stream behind a block's MLP or mixture."""
    mlp = block.mlp
    if isinstance(mlp, Mixture):
        return _mix(x, rms_norm(x, block.mlp_norm, a.norm_eps, a.norm_offset), mlp, a, position)
    gate, up = _joined(mlp.gate_up, _normed(x, block.mlp_norm, mlp.gate_up, a))
    return _down(gate, up, mlp, a, x)


def _normed(x: Tensor, weight: Tensor, reader: Joined, a: Architecture) -> Rounded | Tensor:
    """RMSNorm of x as the layers that read it take it: rounded in the same kernel where one rounding serves them."""
    how = reader.how if isinstance(reader, TritonJoined) else None
    if how is None:
        return rms_norm(x, weight, a.norm_eps, a.norm_offset)
    return norm_quantize(x, weight, a.norm_eps, how, a.norm_offset)


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


def _down(gate: Tensor, up: Tensor, mlp: Mlp, a: Architecture, x: Tensor) -> Tensor:
    if isinstance(mlp.down, TritonLinear) and mlp.down.how is not None:
        return _added(mlp.down, gated_quantize(gate, up, a.activation, mlp.down.how), x)
    return _added(mlp.down, gated(gate, up, a.activation), x)


def waits(parts: Parts, rows: int) -> bool:
    """Whether the host must wait for the device within a forward of so many rows, which no graph can hold then."""
    mixtures = [block.mlp for block in parts.blocks if isinstance(block.mlp, Mixture)]
    return any(_by_host(mixture, rows) for mixture in mixtures)


def _by_host(weights: Mixture, rows: int) -> bool:
    """Whether the host sends rows to their experts: those of a prompt, so that each expert multiplies all of its rows
    in wide tiles; and any where the experts are not alike."""
    return rows > WIDEST or weights.stacked is None


def _mix(x: Tensor, normed: Tensor, weights: Mixture, a: Architecture, position: Tensor) -> Tensor:
    """x plus each row's experts of normed x, added in order of their number."""
    shares, chosen = route(weights.router(normed), weights.per_token, weights.renormalize, position)
    if _by_host(weights, len(x)):

        def run(rows: Tensor, expert: Mlp) -> Tensor:
            gate, up = _joined(expert.gate_up, rows)
            return _down(gate, up, expert, a, torch.zeros_like(rows))

        return x + sum_of_experts(normed, shares, chosen, weights.experts, run)
    assert isinstance(weights.stacked, StackedExperts)
    return weights.stacked.mixed(normed, shares, Picks(chosen), a.activation, x)
