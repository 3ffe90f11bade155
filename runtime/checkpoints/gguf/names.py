"""Tensor names and layouts: llama.cpp's on one side, transformers' on the other.

Two things differ besides names. Files of the architecture "llama" rotate neighbouring rows of a head together, where
transformers rotates row i with row i + size / 2: queries and keys have their rows in another order. And Gemma's norms
are stored with the 1 added that transformers adds when it runs.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ARCHITECTURES: dict[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma": "gemma",
}
"""transformers' model_type → general.architecture."""

ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3 divides its rotary frequencies by, one factor each."""

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# Phi-3's fused layer has the name that others give to one of its halves.
_FUSED_UP = "mlp.gate_up_proj"
_EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_STACKS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")

Heads = Literal["query", "key"]


@dataclass(frozen=True)
class Place:
    """Where transformers' tensor is in a GGUF file.

    tensor    llama.cpp's name.
    expert    its index in the first dimension of a stack of experts; None: the tensor is all of it.
    rotated   whose heads have their rows in llama.cpp's order; None: the rows are in transformers' order.
    plus_one  1 is added to the values there.
    """

    tensor: str
    expert: int | None = None
    rotated: Heads | None = None
    plus_one: bool = False


def to_gguf(name: str, architecture: str) -> Place | None:
    """The place of transformers' tensor (`….weight` or `….bias`); None where llama.cpp has none for it."""
    prefix, _, part = name.rpartition(".")
    if prefix in _OUTSIDE:
        return Place(f"{_OUTSIDE[prefix]}.{part}", plus_one=_adds_one(architecture, prefix))
    if (found := _LAYER.fullmatch(prefix)) is None:
        return None
    number, inside = found.groups()
    inside = inside.replace("block_sparse_moe.gate", "mlp.gate")
    if (expert := _EXPERT.fullmatch(inside)) is not None and expert[2] in _EXPERT_PARTS:
        return Place(f"blk.{number}.{_EXPERT_PARTS[expert[2]]}.{part}", expert=int(expert[1]))
    theirs = "ffn_up" if inside == _FUSED_UP and architecture == "phi3" else _INSIDE.get(inside)
    if theirs is None:
        return None
    return Place(
        f"blk.{number}.{theirs}.{part}",
        rotated=_rotated(architecture, theirs),
        plus_one=_adds_one(architecture, inside),
    )


def from_gguf(tensor: str, architecture: str, experts: int) -> dict[str, Place]:
    """transformers' names of llama.cpp's tensor, one for each of `experts` where it is a stack; none if unknown."""
    base, _, part = tensor.rpartition(".")
    if part not in ("weight", "bias"):
        return {}
    for ours, theirs in _OUTSIDE.items():
        if theirs == base:
            return {f"{ours}.{part}": Place(tensor, plus_one=_adds_one(architecture, ours))}
    if (found := _BLOCK.fullmatch(base)) is None:
        return {}
    prefix, theirs = f"model.layers.{int(found[1])}", found[2]
    if theirs in _STACKS:
        return {
            f"{prefix}.mlp.experts.{index}.{_STACKS[theirs]}.{part}": Place(tensor, expert=index)
            for index in range(experts)
        }
    fused = theirs == "ffn_up" and architecture == "phi3"
    inside = _FUSED_UP if fused else next((ours for ours, known in _INSIDE.items() if known == theirs), None)
    if inside is None:
        return {}
    place = Place(tensor, rotated=_rotated(architecture, theirs), plus_one=_adds_one(architecture, inside))
    return {f"{prefix}.{inside}.{part}": place}


def _rotated(architecture: str, theirs: str) -> Heads | None:
    if architecture != "llama":
        return None
    return {"attn_q": "query", "attn_k": "key"}.get(theirs)  # type: ignore[return-value]


def _adds_one(architecture: str, ours: str) -> bool:
    return architecture == "gemma" and ours.endswith("norm")


def rows_here(rows: int, heads: int) -> NDArray[np.int64]:
    """(rows,) index: row i of transformers' tensor is row index[i] of llama.cpp's. Raises ValueError for odd heads."""
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are no {heads} heads of an even size")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def rows_there(rows: int, heads: int) -> NDArray[np.int64]:
    """(rows,) index: row i of llama.cpp's tensor is row index[i] of transformers'. Raises ValueError for odd heads."""
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are no {heads} heads of an even size")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
