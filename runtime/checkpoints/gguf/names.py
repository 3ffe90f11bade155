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
_STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
# Mixtral's names of the same.
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OURS_OUTSIDE = {theirs: ours for ours, theirs in _OUTSIDE.items()}
_OURS_INSIDE = {theirs: ours for ours, theirs in (_INSIDE | _STACKS).items()}
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
        return _place(f"{_OUTSIDE[prefix]}.{part}", architecture, prefix)
    if (found := _LAYER.fullmatch(prefix)) is None:
        return None
    number, inside = found.groups()
    inside = inside.replace("block_sparse_moe.gate", "mlp.gate")
    if (expert := _EXPERT.fullmatch(inside)) is not None:
        theirs = _STACKS.get(_MIXTRAL.get(expert[2], expert[2]))
        return None if theirs is None else Place(f"blk.{number}.{theirs}.{part}", expert=int(expert[1]))
    theirs = "ffn_up" if inside == _FUSED_UP and architecture == "phi3" else _INSIDE.get(inside)
    return None if theirs is None else _place(f"blk.{number}.{theirs}.{part}", architecture, inside)


def from_gguf(tensor: str, architecture: str, experts: int) -> dict[str, Place]:
    """transformers' names of llama.cpp's tensor, one for each of `experts` where it is a stack; none if unknown."""
    base, _, part = tensor.rpartition(".")
    block = _BLOCK.fullmatch(base)
    theirs = block[2] if block else base
    ours = (_OURS_INSIDE if block else _OURS_OUTSIDE).get(theirs)
    if ours is None or part not in ("weight", "bias"):
        return {}
    ours = _FUSED_UP if theirs == "ffn_up" and architecture == "phi3" else ours
    prefix = f"model.layers.{int(block[1])}." if block else ""
    if theirs in _STACKS.values():
        return {f"{prefix}mlp.experts.{i}.{ours}.{part}": Place(tensor, expert=i) for i in range(experts)}
    return {f"{prefix}{ours}.{part}": _place(tensor, architecture, ours)}


def _place(tensor: str, architecture: str, ours: str) -> Place:
    """The place of a tensor that is no stack, whose module transformers calls `ours` (in its block)."""
    rotated: dict[str, Heads] = {"self_attn.q_proj": "query", "self_attn.k_proj": "key"}
    return Place(
        tensor,
        rotated=rotated.get(ours) if architecture == "llama" else None,
        plus_one=architecture == "gemma" and ours.endswith("norm"),
    )


def rows_here(rows: int, heads: int) -> NDArray[np.int64]:
    """(rows,) index: row i of transformers' tensor is row index[i] of llama.cpp's. Raises ValueError for odd heads."""
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are no {heads} heads of an even size")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def rows_there(rows: int, heads: int) -> NDArray[np.int64]:
    """(rows,) index: row i of llama.cpp's tensor is row index[i] of transformers'. Raises ValueError for odd heads."""
    return np.argsort(rows_here(rows, heads))
