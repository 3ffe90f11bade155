"""From a checkpoint to a decoder: its weights packed for the kernels that run, block by block."""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from runtime.cache import scheme
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Architecture
from runtime.contract import Decoder
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, linear
from runtime.model.build_feed_forward import mixture, mlp
from runtime.model.layers import Attention, Block, Norm, Parts, has_planes, require_used
from runtime.model.rotary import RotaryTables
from runtime.model.tensor_reader import TensorReader

Weight = PackedWeight | Tensor


def build(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: Any,
    kernel: Kernel,
    device: torch.device,
    planes: bool = False,
) -> Decoder:
    """The decoder of a checkpoint; `planes` as `load` has it.

    Raises UserError naming a missing or misshapen tensor, why there can be no planes, and kernels that no layer fits.
    """
    a, backend = architecture, kernel.backend
    if planes and not (backend.has_planes and kernel.exact):
        raise UserError(f"planes need Specpress' own kernels, found {kernel.name!r}; use kernels='auto' or 'reference'")
    kv = scheme.read(checkpoint, a, device)
    reader = TensorReader(checkpoint, kernel, device, planes, a)
    shape = (a.vocab, a.hidden)
    names = a.names
    table = reader.table(f"{names.embedding}.weight", shape)
    embedding: Tensor | None = table
    if backend.repacks:
        # A tied model's table lies in the head's blocks. Another is copied now, so that its file's pages can go.
        embedding = None if a.tied else table.clone()
    rotary = RotaryTables(config, a, device)
    blocks = tuple(_block(reader, a, number, rotary) for number in range(a.layers))
    norm = reader.norm(names.norm)
    assert norm is not None
    head = linear(table if a.tied else reader.weight(names.head, shape), reader.bias(names.head, a.vocab), kernel)
    parts = Parts(embedding, blocks, norm, head, _positions(reader, a))
    if planes and not has_planes(parts):
        raise UserError(
            f"{checkpoint.path.name}: planes are the halves of int8 weights, and this model has no int8 layers;"
            " compress it to int8, or choose another drafter than nested"
        )
    require_used(kernel, parts)
    decoder: Decoder = resolve_name(backend.decoder)(a, config, parts, kernel, kv)
    return decoder


def _positions(reader: TensorReader, a: Architecture) -> Tensor | None:
    if a.names.positions is None:
        return None
    whole = reader.table(f"{a.names.positions}.weight", (a.max_positions + a.first_position, a.hidden))
    return whole[a.first_position :].float().contiguous()


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


def _attention(reader: TensorReader, a: Architecture, prefix: str, number: int, rotary: RotaryTables) -> Attention:
    names, heads, kv = a.names, a.heads * a.head_dim, a.kv_heads * a.head_dim
    orders: list[Tensor | None] = [None] * len(names.qkv)
    if a.rotary_neighbours:
        orders[:2] = [_halves(count, a.head_dim, rotary.width) for count in (a.heads, a.kv_heads)]
    if a.grouped_rows:
        orders = [_ungrouped(a)]
    rotates = rotary.of[number] is not None
    normed = a.query_key_norm and (rotates or a.query_key_norm_layers == "all")
    query, key = (
        _head_norm(reader, a, f"{prefix}.{name}", count, rotary.width) if normed else None
        for name, count in ((names.query_norm, a.heads), (names.key_norm, a.kv_heads))
    )
    return Attention(
        qkv=reader.join([f"{prefix}.{name}" for name in names.qkv], [heads, kv, kv], a.hidden, orders),
        out=reader.linear(f"{prefix}.{names.out}", (a.hidden, heads)),
        q_norm=query,
        k_norm=key,
        window=a.windows[number],
        sinks=reader.vector(f"{prefix}.{names.sinks}", a.heads) if a.sinks else None,
        rotary=rotary.of[number],
        grows=a.query_growth_layers == "all" or not rotates,
    )


def _head_norm(reader: TensorReader, a: Architecture, name: str, heads: int, rotated: int) -> Tensor:
    """The weight of queries' or keys' norm, in the order of their rows."""
    if not a.query_key_weights:
        return torch.ones(a.head_dim, device=reader.device)
    if a.query_key_span == "each head":
        found = [reader.norm(name.format(head), heads=heads) for head in range(heads)]
        weight = torch.stack([norm.weight for norm in found if norm is not None])
    else:
        norm = reader.norm(name, heads=heads)
        assert norm is not None
        weight = norm.weight
    if not a.rotary_neighbours:
        return weight
    return weight.flatten()[_halves(weight.numel() // a.head_dim, a.head_dim, rotated)].view(weight.shape)


def _block(reader: TensorReader, a: Architecture, number: int, rotary: RotaryTables) -> Block:
    prefix, names = a.names.block.format(number), a.names

    def norm(name: str | None) -> Norm | None:
        return reader.norm(None if name is None else f"{prefix}.{name}")

    dense = a.experts is None or number in a.dense_layers
    return Block(
        input_norm=norm(names.input_norm),
        attention=_attention(reader, a, prefix, number, rotary),
        mlp_norm=norm(names.mlp_norm),
        mlp=mlp(reader, a, prefix, a.intermediate) if dense else mixture(reader, a, prefix),
        attention_norm=norm(names.attention_norm),
        output_norm=norm(names.output_norm),
    )
