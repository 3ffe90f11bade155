"""Families with latent attention: one function each."""

import math
from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, given, llama
from runtime.checkpoints.families.mixtures import in_groups, in_shared_experts, of_experts, total
from runtime.checkpoints.mixers import Latent
from runtime.checkpoints.record import Architecture, Experts
from runtime.errors import UserError


def _scaling(config: Config, dim: int) -> float:
    """What scores are multiplied by: yarn's part of it is in the configuration of the rotation."""
    rope = config.get("rope_parameters") or {}
    wide, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not wide or factor <= 1:
        return dim**-0.5
    return float(dim**-0.5 * (0.1 * wide * math.log(factor) + 1.0) ** 2)


def _latent(config: Config, experts: Experts | None, **more: Any) -> Architecture | None:
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rotated, plain, value = (count(config, key) for key in keys)
    query = count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else None
    dense = min(given(config, "first_k_dense_replace", 0), count(config, "num_hidden_layers"))
    if experts is not None:
        experts = replace(
            experts,
            scale=float(given(config, "routed_scaling_factor", 1.0)),
            shared=count(config, "moe_intermediate_size") * given(config, "n_shared_experts", 1),
            **in_shared_experts(),
        )
    found = llama(
        # A head, to this function, is what rotates.
        config | {"num_key_value_heads": None, "head_dim": rotated},
        activation(config),
        attention_scale=_scaling(config, rotated + plain),
        experts=experts,
        **({"dense_layers": () if experts is None else tuple(range(dense))} | more),
    )
    if found is None:
        return None
    return replace(found, kv_heads=1, head_dim=rotated + rank, latent=Latent(rank, rotated, plain, value, query))


def deepseek_v2(config: Config) -> Architecture | None:
    """A softmax chooses; of groups those with the best expert. Shares are not divided by their sum."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        return None
    experts = of_experts(config, total(config, "n_routed_experts", "num_experts"), "moe_intermediate_size", False)
    groups = in_groups(config, experts, 1) if method == "group_limited_greedy" else (1, 1, 1)
    return _latent(config, replace(experts, groups=groups), rotary_neighbours=True)


def deepseek_v3(config: Config, **more: Any) -> Architecture | None:
    """Sigmoids choose, with a correction; of groups those with the best two experts."""
    renormalize = bool(config.get("norm_topk_prob", True))
    name = total(config, "n_routed_experts", "num_local_experts")
    experts = of_experts(config, name, "moe_intermediate_size", renormalize)
    experts = replace(
        experts,
        scoring="sigmoid",
        correction="gate.e_score_correction_bias",
        groups=in_groups(config, experts, 2),
    )
    return _latent(config, experts, rotary_neighbours=bool(config.get("rope_interleave", True)), **more)


def glm4_moe_lite(config: Config) -> Architecture | None:
    """DeepSeek-V3's, which names its dense layers."""
    layers = count(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers:
        raise UserError(f"config.json: mlp_layer_types must name {layers} layers, found {len(kinds)}")
    return deepseek_v3(
        config,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind != "sparse"),
    )


def youtu(config: Config) -> Architecture | None:
    """DeepSeek-V3's attention, and no experts."""
    return _latent(
        config,
        None,
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary_neighbours=bool(config.get("rope_interleave", True)),
    )
