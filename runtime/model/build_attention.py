"""From a checkpoint to a block's attention: rows of queries, keys and values in the order that the kernels have."""

from pkgutil import resolve_name

import torch
from torch import Tensor

from runtime.checkpoints.mixers import Latent
from runtime.checkpoints.record import Architecture
from runtime.formats import dequantize
from runtime.formats.codes import with_whole_codes
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, linear
from runtime.model.layers import Attention, LatentHeads, Norm
from runtime.model.rotary import RotaryTables
from runtime.model.tensor_reader import TensorReader, take_rows


def _halves(heads: int, dim: int, rotated: int) -> Tensor:
    """The order in which rows of heads are taken where neighbours rotate together: halves do then, which is what the
    kernels have, and scores are the same."""
    order = torch.arange(dim)
    order = torch.cat((order[:rotated:2], order[1:rotated:2], order[rotated:]))
    return (torch.arange(heads).unsqueeze(1) * dim + order).flatten()


def _ungrouped(a: Architecture) -> Tensor:
    """The order in which rows that stand key head by key head are all queries, all keys, all values."""
    per = a.heads // a.kv_heads
    rows = torch.arange((a.heads + 2 * a.kv_heads) * a.head_dim).view(a.kv_heads, per + 2, a.head_dim)
    return torch.cat([part.flatten() for part in (rows[:, :per], rows[:, per], rows[:, per + 1])])


def attention(reader: TensorReader, a: Architecture, prefix: str, number: int, rotary: RotaryTables) -> Attention:
    """The attention of block `number`, whose tensors' names begin with `prefix`."""
    if a.latent is not None:
        return _latent(reader, a, a.latent, prefix, number, rotary)
    names, (kv_heads, dim) = a.names, a.shape(number)
    heads, kv, width = a.heads * dim, kv_heads * dim, rotary.width(number)
    shares, keys_as_values = a.source(number) != number, number in a.keys_as_values
    made = 1 if shares else 2 if keys_as_values else 3
    layers, sizes = (names.qkv[:made], [heads, kv, kv][:made]) if made < 3 else (names.qkv, [heads, kv, kv])
    orders: list[Tensor | None] = [None] * len(layers)
    if a.rotary_neighbours:
        orders[:2] = [_halves(count, dim, width) for count in (a.heads, kv_heads)][: len(layers)]
    if a.grouped_rows:
        orders = [_ungrouped(a)]
    rotates = rotary.of[number] is not None
    normed = a.query_key_norm and (rotates or a.query_key_norm_layers == "all")
    query, key = (
        _head_norm(reader, a, f"{prefix}.{name}", count, dim, width) if normed and there else None
        for name, count, there in ((names.query_norm, a.heads, True), (names.key_norm, kv_heads, not shares))
    )
    gate, whole = None, [*sizes]
    if a.output_gate:
        # Of each head a query and its gate.
        rows = torch.arange(2 * heads).view(a.heads, 2, dim)
        orders[0], whole[0], first = rows[:, 0].flatten(), 2 * heads, f"{prefix}.{names.qkv[0]}"
        bias, of_gate = reader.bias(first, 2 * heads), rows[:, 1].flatten()
        taken = take_rows(reader.weight(first, (2 * heads, a.hidden)), of_gate)
        gate = linear(taken, None if bias is None else bias[of_gate], reader.kernel)
    elif names.attention_gate is not None:
        gate = reader.linear(f"{prefix}.{names.attention_gate}", (a.heads if a.gate_by_head else heads, a.hidden))
    return Attention(
        qkv=reader.join([f"{prefix}.{name}" for name in layers], sizes, a.hidden, orders, whole),
        gate=gate,
        out=reader.linear(f"{prefix}.{names.out}", (a.hidden, heads)),
        q_norm=query,
        k_norm=key,
        window=a.windows[number],
        sinks=reader.vector(f"{prefix}.{names.sinks}", a.heads) if a.sinks else None,
        rotary=rotary.of[number],
        grows=a.query_growth_layers == "all" or not rotates,
        v_norm=torch.ones(dim, device=reader.device) if a.value_norm and not shares else None,
        shares=shares,
        keys_as_values=keys_as_values,
    )


def _head_norm(reader: TensorReader, a: Architecture, name: str, heads: int, dim: int, rotated: int) -> Tensor:
    """The weight of queries' or keys' norm, in the order of their rows."""
    if not a.query_key_weights:
        return torch.ones(dim, device=reader.device)
    if a.query_key_span == "each head" and "{}" not in name:
        weight = reader.table(f"{name}.weight", (heads, dim)).float()
    elif a.query_key_span == "each head":
        found = [reader.norm(name.format(head), dim) for head in range(heads)]
        weight = torch.stack([norm.weight for norm in found if norm is not None])
    else:
        norm = reader.norm(name, heads * dim if a.query_key_span == "heads" else dim)
        assert norm is not None
        weight = norm.weight
    if not a.rotary_neighbours:
        return weight
    return weight.flatten()[_halves(weight.numel() // dim, dim, rotated)].view(weight.shape)


def _latent(
    reader: TensorReader, a: Architecture, how: Latent, prefix: str, number: int, rotary: RotaryTables
) -> Attention:
    """Latent attention, with the layer that expands a token's vector taken into queries and values.

    What rotates comes last on disk, of a head's query and of a token's vector, and first in the kernels.
    """
    each, vector = how.rotated + how.plain, how.rotated + how.rank
    turned = _halves(1, how.rotated, how.rotated) if a.rotary_neighbours else torch.arange(how.rotated)
    in_head, in_vector = (torch.cat((size + turned, torch.arange(size))) for size in (how.plain, how.rank))
    in_heads = (torch.arange(a.heads).unsqueeze(1) * each + in_head).flatten()
    compressed, query, query_norm = f"{prefix}.{how.compressed}", None, None
    if how.query_rank is None:
        names, sizes, orders = [f"{prefix}.{how.query}", compressed], [a.heads * each, vector], [in_heads, in_vector]
        qkv = reader.join(names, sizes, a.hidden, orders)
    else:
        names, sizes = [f"{prefix}.{how.query_compressed}", compressed], [how.query_rank, vector]
        qkv = reader.join(names, sizes, a.hidden, [None, in_vector])
        expand = reader.weight(f"{prefix}.{how.query_expand}", (a.heads * each, how.query_rank))
        query = linear(take_rows(expand, in_heads), None, reader.kernel)
        query_norm = Norm(reader.vector(f"{prefix}.{how.query_norm}.weight", how.query_rank))
    whole = reader.weight(f"{prefix}.{how.expand}", (a.heads * (how.plain + how.value), how.rank))
    # Keys take it the other way round, which codes in groups cannot be: it is plain.
    plain = dequantize(with_whole_codes(whole)) if isinstance(whole, PackedWeight) else whole
    heads = plain.view(a.heads, how.plain + how.value, how.rank)
    return Attention(
        qkv=qkv,
        out=reader.linear(f"{prefix}.{a.names.out}", (a.hidden, a.heads * how.value)),
        q_norm=None,
        k_norm=None,
        window=a.windows[number],
        rotary=rotary.of[number],
        latent=_stacked(
            LatentHeads(
                query_norm=query_norm,
                query=query,
                norm=Norm(reader.vector(f"{prefix}.{how.norm}.weight", how.rank)),
                keys=tuple(linear(head[: how.plain].t().contiguous(), None, reader.kernel) for head in heads),
                values=tuple(linear(head[how.plain :].contiguous(), None, reader.kernel) for head in heads),
            ),
            reader.kernel,
        ),
    )


def _stacked(weights: LatentHeads, kernel: Kernel) -> LatentHeads:
    """Latent attention's layers as the kernels want them; block by block, so that only one is held twice meanwhile."""
    stack = kernel.backend.stack_heads
    if not stack or not kernel.exact:
        return weights
    made: LatentHeads = resolve_name(stack)(weights)
    return made
