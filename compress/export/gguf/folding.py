"""What a model's record has and an architecture of llama.cpp has no key for: multiplied into weights, or left out."""

from dataclasses import replace

import torch
from torch import Tensor

from compress.export.gguf.tensors import Weight
from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.gguf.names import EMBEDDING, FORMS, HEAD, architecture_of
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

Factor = float | Tensor


def factors(a: Architecture) -> dict[str, Factor]:
    """What weights and biases are multiplied by, one number or one a row, by the names of their parts in a block.

    Multipliers of what a layer reads are in its weight, those of what it makes in its bias too.
    """
    if not FORMS[architecture_of(a)].folded:
        return {}
    read, added = a.attention_scales
    keys = a.scaling * a.head_dim**0.5
    gates, after = a.mlp_scales
    found: dict[str, Factor] = {
        EMBEDDING: a.embedding_scale,
        HEAD: a.logits_scale,
        "attn_q.weight": read,
        "attn_k.weight": read * keys,
        "attn_k.bias": keys,
        "attn_v.weight": read,
        "attn_output.weight": added,
        "ffn_gate.weight": gates,
        "ffn_gate.bias": gates,
        "ffn_down.weight": after,
        "ffn_down.bias": after,
    }
    if (how := a.mamba) is not None:
        each = zip(how.multipliers, how.sizes, strict=True)
        found["ssm_in.weight"] = torch.cat([torch.full((size,), how.read * factor) for factor, size in each])
        found["ssm_out.weight"] = how.added
    return found


def scaled(weight: Weight, factor: Factor) -> Weight:
    """A weight (N, K), or a vector (N,), times a number or one a row; a packed one by its scales, its codes kept."""
    if isinstance(factor, float) and factor == 1.0:
        return weight
    if isinstance(weight, PackedWeight) and weight.scheme.kind == "mxfp4":
        # Its scales are powers of two.
        weight = dequantize(weight)
    each = factor if isinstance(factor, float) else factor.unsqueeze(-1)
    if isinstance(weight, Tensor):
        return weight.float() * (factor if weight.dim() == 1 else each)
    offset = None if weight.offset is None else weight.offset * each
    return replace(weight, scale=weight.scale * each, offset=offset)


def folded(a: Architecture) -> Architecture:
    """The record of the model that the file holds: the same but for `factors`, and for parts that no layer has."""
    kind = architecture_of(a)
    if FORMS[kind].folded:
        how = None if a.mamba is None else replace(a.mamba, read=1.0, added=1.0, multipliers=(1.0,) * 5)
        a = replace(a, embedding_scale=1.0, logits_scale=1.0, attention_scale=a.head_dim**-0.5, mamba=how)
        a = replace(a, attention_scales=(1.0, 1.0), mlp_scales=(1.0, 1.0))
    if a.mamba is not None and not any(mixer.endswith("mamba") for mixer in a.mixers):
        a = replace(a, mamba=None, mixers=())
    return a
