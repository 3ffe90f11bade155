"""A decoder's view for the nested draft: the same weights, int8 layers by their upper four bits.

Self-speculation without a second model. A view holds the tensors of the decoder that it was made from, and no others.
"""

from dataclasses import replace

from runtime.errors import UserError
from runtime.kernels.joined import Joined, Linear
from runtime.kernels.native_linear import NativeLinear, upper_weight
from runtime.kernels.reference import Int8Linear, UpperLinear
from runtime.model.layers import Attention, Block, Mixture, Mlp, Parts, linears


def upper_linear(layer: Linear) -> Linear:
    """The layer on the upper plane of its weight; a layer without planes (float, 4-bit, …) as it is."""
    if isinstance(layer, NativeLinear) and layer.weight.has_planes:
        return NativeLinear(upper_weight(layer.weight), layer.path, layer.pool)
    if isinstance(layer, Int8Linear) and layer.has_planes:
        return UpperLinear(layer)
    # Triton's, which nothing here may import.
    upper = getattr(layer, "upper", None)
    return upper() if upper is not None and getattr(layer, "has_planes", False) else layer


def upper_parts(parts: Parts) -> Parts:
    """The same decoder on upper planes. Raises UserError where no layer has planes."""
    if not has_planes(parts):
        raise UserError(
            "this model's weights were not loaded as planes, of which `nested` reads the upper ones;"
            " load it with planes=True"
        )
    blocks, own = tuple(_upper_block(block) for block in parts.blocks), parts.layer_inputs
    own = None if own is None else replace(own, projection=upper_linear(own.projection))
    return replace(parts, blocks=blocks, head=upper_linear(parts.head), layer_inputs=own)


def has_planes(parts: Parts) -> bool:
    """Whether any layer can be read by its upper plane."""
    return any(upper_linear(layer) is not layer for layer in linears(parts))


def _upper_block(block: Block) -> Block:
    attention, mamba, mlp, own = block.attention, block.mamba, block.mlp, block.own
    if attention is not None:
        attention = replace(attention, qkv=_upper_joined(attention.qkv), out=upper_linear(attention.out))
    if isinstance(attention, Attention) and attention.gate is not None:
        attention = replace(attention, gate=upper_linear(attention.gate))
    if mamba is not None:
        mamba = replace(mamba, into=upper_linear(mamba.into), out=upper_linear(mamba.out))
    if mlp is not None:
        mlp = _upper_mixture(mlp) if isinstance(mlp, Mixture) else _upper_mlp(mlp)
    if own is not None:
        own = replace(own, gate=upper_linear(own.gate), out=upper_linear(own.out))
    return replace(block, attention=attention, mamba=mamba, mlp=mlp, own=own)


def _upper_mixture(mixture: Mixture) -> Mixture:
    # The router decides which experts are read at all, and is small: it stays whole.
    experts = tuple(_upper_mlp(expert) for expert in mixture.experts)
    stacked = None if mixture.stacked is None else mixture.stacked.upper()
    shared = None if mixture.shared is None else _upper_mlp(mixture.shared)
    beside = mixture.beside
    beside = None if beside is None else replace(beside, mlp=_upper_mlp(beside.mlp))
    return replace(mixture, experts=experts, stacked=stacked, shared=shared, beside=beside)


def _upper_mlp(mlp: Mlp) -> Mlp:
    return replace(mlp, gate_up=_upper_joined(mlp.gate_up), down=upper_linear(mlp.down))


def _upper_joined(joined: Joined) -> Joined:
    return replace(joined, parts=tuple(upper_linear(part) for part in joined.parts))
