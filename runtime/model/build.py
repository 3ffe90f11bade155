"""From a checkpoint to a decoder: its weights packed for the kernels that run, block by block."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.cache import scheme
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Architecture
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import Kernel, linear
from runtime.model.build_attention import attention
from runtime.model.build_feed_forward import mixture, mlp
from runtime.model.build_layer_inputs import layer_gate, layer_inputs
from runtime.model.build_states import delta_rule, short_convolution, state_space
from runtime.model.layers import Attention, Block, Norm, Parts, require_used
from runtime.model.planes import has_planes
from runtime.model.rotary import RotaryTables
from runtime.model.state_layers import DeltaRule, ShortConvolution
from runtime.model.tensor_reader import TensorReader

if TYPE_CHECKING:
    from runtime.model.base import BaseDecoder

Weight = PackedWeight | Tensor


def build(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: Any,
    kernel: Kernel,
    device: torch.device,
    planes: bool = False,
) -> "BaseDecoder":
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
    blocks = tuple(build_block(reader, a, number, rotary) for number in range(a.layers))
    norm = reader.norm(names.norm)
    assert norm is not None
    head = linear(table if a.tied else reader.weight(names.head, shape), reader.bias(names.head, a.vocab), kernel)
    parts = Parts(embedding, blocks, norm, head, _positions(reader, a), layer_inputs(reader, a))
    if planes and not has_planes(parts):
        raise UserError(
            f"{checkpoint.path.name}: planes are the halves of int8 weights, and this model has no int8 layers;"
            " compress it to int8, or choose another drafter than nested"
        )
    require_used(kernel, parts)
    decoder: BaseDecoder = resolve_name(backend.decoder)(a, config, parts, kernel, kv)
    return decoder


def _positions(reader: TensorReader, a: Architecture) -> Tensor | None:
    if a.names.positions is None:
        return None
    whole = reader.table(f"{a.names.positions}.weight", (a.max_positions + a.first_position, a.hidden))
    return whole[a.first_position :].float().contiguous()


def build_block(reader: TensorReader, a: Architecture, number: int, rotary: RotaryTables) -> Block:
    """The weights of one block. Raises UserError naming a tensor that is missing or misshapen."""
    prefix, names = a.names.block.format(number), a.names

    def norm(name: str | None) -> Norm | None:
        return reader.norm(None if name is None else f"{prefix}.{name}")

    mixer, has_mlp = a.mixers[number] if a.mixers else "attention", number not in a.without_mlp
    dense = a.experts is None or number in a.dense_layers
    size = a.intermediates[number] if a.intermediates else a.intermediate
    return Block(
        input_norm=None if mixer == "nothing" else norm(names.input_norm),
        attention=_mixer(reader, a, prefix, number, rotary),
        mlp_norm=norm(names.mlp_norm) if has_mlp else None,
        mlp=None if not has_mlp else mlp(reader, a, prefix, size) if dense else mixture(reader, a, prefix, size),
        attention_norm=norm(names.attention_norm),
        output_norm=norm(names.output_norm),
        mamba=state_space(reader, a, prefix) if mixer in ("mamba", "attention and mamba") else None,
        own=layer_gate(reader, a, prefix) if a.layer_input else None,
        scale=1.0 if names.block_scale is None else float(reader.vector(f"{prefix}.{names.block_scale}", 1)),
    )


def _mixer(
    reader: TensorReader, a: Architecture, prefix: str, number: int, rotary: RotaryTables
) -> Attention | ShortConvolution | DeltaRule | None:
    if number in a.attending:
        return attention(reader, a, prefix, number, rotary)
    if a.mixers[number] in ("mamba", "nothing"):
        return None
    return (delta_rule if a.mixers[number] == "delta" else short_convolution)(reader, a, prefix)
