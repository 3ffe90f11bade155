"""Families with a mixture of experts beyond Mixtral and Qwen3-MoE: one function each."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import (
    Config,
    activation,
    count,
    given,
    layer_types,
    llama,
    rotary_sets,
    windows,
)
from runtime.checkpoints.families.dense import cohere2, hunyuan, neighbours, olmo2
from runtime.checkpoints.record import Architecture, Experts, Names
from runtime.errors import UserError


def of_experts(config: Config, total: str, hidden: str, renormalize: bool) -> Experts:
    """Experts by the names of the keys that have their number and their channels. Raises UserError for too few."""
    number, per_token = count(config, total), count(config, "num_experts_per_tok")
    if per_token > number:
        raise UserError(f"config.json: num_experts_per_tok is {per_token}, and a layer has {number} experts")
    return Experts(number, per_token, count(config, hidden), renormalize)


def total(config: Config, *names: str) -> str:
    """The name under which config.json has the number of experts: releases of transformers differ."""
    return next((name for name in names if name in config), names[0])


def in_shared_experts(block: str = "mlp", gated: bool = True, name: str = "shared_experts") -> dict[str, Any]:
    """The layers of what every token goes through, which the mixture `block` calls `name`; what record.Experts has."""
    parts = ("gate_proj", "up_proj") if gated else ("up_proj",)
    return {
        "shared_gate_up": tuple(f"{block}.{name}.{part}" for part in parts),
        "shared_down": f"{block}.{name}.down_proj",
    }


def in_groups(config: Config, experts: Experts, best: int) -> tuple[int, int, int]:
    """What record.Experts has of groups; `best` of each add up. Raises UserError where they do not fit."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == 1:
        return 1, 1, 1
    size, rest = divmod(experts.count, groups)
    if rest or size < best or chosen > groups or experts.per_token > chosen * size:
        raise UserError(
            f"config.json: n_group {groups} and topk_group {chosen} do not fit {experts.count} experts, of which"
            f" {experts.per_token} are chosen: groups are of one size, {best} or more, and hold the chosen ones"
        )
    # Of all groups any expert may be chosen, as if there were none.
    return (1, 1, 1) if chosen == groups else (groups, chosen, best)


def dense_among(config: Config, first: int = 0) -> tuple[int, ...]:
    """The layers that mlp_layer_types calls dense; without it so many of the first.

    Raises UserError where it does not tell of all layers.
    """
    layers = count(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["dense"] * min(first, layers) + ["sparse"] * (layers - first)
    if len(kinds) != layers:
        raise UserError(f"config.json: mlp_layer_types must name {layers} layers, found {len(kinds)}")
    return tuple(n for n, kind in enumerate(kinds) if kind != "sparse")


def olmoe(config: Config) -> Architecture | None:
    """Queries and keys are normed as one vector."""
    if config.get("clip_qkv") is not None:
        return None
    number = total(config, "num_experts", "num_local_experts")
    return llama(
        config,
        activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        query_key_norm=True,
        query_key_span="heads",
        experts=of_experts(config, number, "intermediate_size", bool(config.get("norm_topk_prob", False))),
    )


def flex_olmo(config: Config) -> Architecture | None:
    """OLMo 2's blocks."""
    found, number = olmo2(config), total(config, "num_experts", "num_local_experts")
    experts = of_experts(config, number, "intermediate_size", bool(config.get("norm_topk_prob", False)))
    return None if found is None else replace(found, norm_eps=config.get("rms_norm_eps", 1e-6), experts=experts)


def mellum(config: Config) -> Architecture | None:
    """Qwen3-MoE's blocks, layers of two kinds, a rotation for each."""
    number = total(config, "num_experts", "num_local_experts")
    return llama(
        config,
        activation(config),
        query_key_norm=True,
        rotary=rotary_sets(config),
        windows=windows(config) if layer_types(config) else (None,) * count(config, "num_hidden_layers"),
        experts=of_experts(config, number, "moe_intermediate_size", bool(config.get("norm_topk_prob", True))),
        dense_layers=dense_among(config),
    )


def qwen2_moe(config: Config) -> Architecture | None:
    """An expert that every token goes through, with a gate of its own."""
    layers = count(config, "num_hidden_layers")
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    number = total(config, "num_experts", "num_local_experts")
    experts = of_experts(config, number, "moe_intermediate_size", bool(config.get("norm_topk_prob", False)))
    return llama(
        config,
        activation(config),
        experts=replace(
            experts, shared=count(config, "shared_expert_intermediate_size"), shared_gate="shared_expert_gate"
        ),
        dense_layers=tuple(i for i in range(layers) if i in only or (i + 1) % step),
        windows=windows(config) if config.get("use_sliding_window") else (None,) * layers,
    )


def cohere2_moe(config: Config) -> Architecture | None:
    """Cohere2's blocks; shares are of the chosen alone, and what all go through is added or averaged with the rest.

    Averages are halves of what a mixture adds, so beside dense layers they are not run here.
    """
    found, layers = cohere2(config), count(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["sparse"] * layers
    dense = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    scoring = config.get("expert_selection_fn", "softmax")
    shared, averaged = config.get("num_shared_experts") or 0, False
    if shared:
        averaged = config.get("shared_expert_combination_strategy", "average") == "average"
    if found is None or scoring not in ("softmax", "sigmoid") or dense:
        return None
    renormalize = scoring == "softmax" or bool(config.get("norm_topk_prob", True))
    experts = of_experts(config, total(config, "num_experts", "num_local_experts"), "intermediate_size", renormalize)
    experts = replace(
        experts, scoring=scoring, shared=shared * count(config, "intermediate_size"), **in_shared_experts()
    )
    eps = config.get("rms_norm_eps")
    if eps is not None:
        found = replace(found, norm="rms", norm_eps=eps)
    return replace(found, experts=experts, mlp_scales=(1.0, 0.5 if averaged else 1.0))


def ernie4_5_moe(config: Config) -> Architecture | None:
    """A softmax chooses, with a correction; shares are divided by their sum, which is never below the least allowed."""
    found, layers = neighbours(config), count(config, "num_hidden_layers")
    number, chosen = count(config, "moe_num_experts"), count(config, "moe_k")
    if chosen > number:
        raise UserError(f"config.json: moe_k is {chosen}, and a layer has {number} experts")
    if found is None or given(config, "moe_norm_min", 1e-12) * number > 1:
        return None
    start, step, end = (
        given(config, f"moe_layer_{k}", d) for k, d in (("start_index", 1), ("interval", 1), ("end_index", -1))
    )
    last = layers - 1 if end == -1 else end
    shared = config.get("moe_num_shared_experts", 2) or 0
    experts = Experts(
        *(number, chosen, count(config, "moe_intermediate_size"), True),
        correction="moe_statics.e_score_correction_bias",
        shared=count(config, "moe_intermediate_size") * shared,
        **in_shared_experts(),
    )
    dense = tuple(n for n in range(layers) if (n + 1) % step or not start <= n <= last)
    return replace(found, experts=experts, dense_layers=dense, tied=bool(config.get("tie_word_embeddings", True)))


def hunyuan_moe(config: Config) -> Architecture | None:
    """HunYuan's attention; one expert of the same size is everyone's. None where layers have other numbers of them."""
    found, chosen = hunyuan(config), config.get("moe_topk", config.get("num_experts_per_tok"))
    if found is None or not isinstance(chosen, int) or not isinstance(config.get("num_experts"), int):
        return None
    experts = of_experts(config | {"num_experts_per_tok": chosen}, "num_experts", "intermediate_size", True)
    experts = replace(experts, routers=("gate.wg",), shared=experts.hidden, **in_shared_experts(name="shared_mlp"))
    return replace(found, experts=experts)


def llama4(config: Config) -> Architecture | None:
    """Chunks, layers without positions whose queries grow, experts of which a share multiplies the input."""
    layers = count(config, "num_hidden_layers")
    every = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    step = config.get("interleave_moe_layer_step", 1)
    mixed = config.get("moe_layers")
    mixed = range(step - 1, layers, step) if mixed is None else mixed
    if len(rotated) < layers:
        raise UserError(f"config.json: no_rope_layers must tell of {layers} layers, found {len(rotated)}")
    kinds = config.get("layer_types") or ["chunked_attention" if it else "full_attention" for it in rotated[:layers]]
    growth = None
    if config.get("attn_temperature_tuning", True):
        growth = float(config.get("attn_scale", 0.1)), count({"floor_scale": 8192} | config, "floor_scale"), 1
    experts = of_experts(config, "num_local_experts", "intermediate_size", False)
    return llama(
        config,
        activation(config),
        names=replace(
            Names(), gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"
        ),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        intermediate=config.get("intermediate_size_mlp", 16384),
        rotary=tuple("" if it else None for it in rotated[:layers]),
        rotary_neighbours=True,
        query_key_norm=bool(config.get("use_qk_norm", True)),
        query_key_norm_rotated=True,
        query_key_weights=False,
        query_key_norm_layers="rotated",
        query_growth=growth,
        query_growth_layers="not rotated",
        windows=windows(config | {"layer_types": kinds}, "chunked_attention", "attention_chunk_size"),
        chunked=True,
        experts=replace(
            experts,
            names=("feed_forward",),
            routers=("router",),
            scoring="sigmoid",
            scaled_inputs=True,
            shared=experts.hidden,
            shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
            shared_down="feed_forward.shared_expert.down_proj",
            transposed=True,
        ),
        dense_layers=tuple(i for i in range(layers) if i not in mixed),
    )


def phimoe(config: Config) -> Architecture | None:
    """Layer norms, and two experts, each with its share of a softmax among those that come near to it."""
    if count(config, "num_experts_per_tok") != 2:
        return None
    experts = of_experts(config, "num_local_experts", "intermediate_size", False)
    return llama(
        config,
        activation(config),
        norm="layer",
        norm_eps=config.get("rms_norm_eps", 1e-5),
        windows=windows(config),
        experts=replace(
            experts,
            routers=("router", "gate"),
            scoring="sparse mixer",
            tolerance=2.0 * float(config.get("router_jitter_noise", 0.01)),
        ),
    )


def gpt_oss(config: Config) -> Architecture | None:
    """Sinks, windows in every other layer, clamped gates, biases; a softmax over the chosen, as granitemoe has it."""
    number = total(config, "num_local_experts", "num_experts")
    clamp = float(config.get("swiglu_limit", 7.0)), float(config.get("swiglu_alpha", 1.702))
    return llama(
        config,
        "clamped_swiglu",
        names=Names(),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        sinks=True,
        windows=windows(config),
        experts=replace(
            of_experts(config, number, "intermediate_size", True),
            routers=("router",),
            transposed=True,
            interleaved=True,
            clamp=clamp,
        ),
    )
