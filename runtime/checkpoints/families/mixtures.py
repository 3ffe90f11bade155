"""Families with a mixture of experts beyond Mixtral and Qwen3-MoE: one function each."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, llama, windows
from runtime.checkpoints.families.dense import granite
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


def in_shared_experts(block: str = "mlp", gated: bool = True) -> dict[str, Any]:
    """The layers of what every token goes through, where the mixture `block` calls it so; what record.Experts has."""
    parts = ("gate_proj", "up_proj") if gated else ("up_proj",)
    return {
        "shared_gate_up": tuple(f"{block}.shared_experts.{part}" for part in parts),
        "shared_down": f"{block}.shared_experts.down_proj",
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
    return groups, chosen, best


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


def granitemoe(config: Config) -> Architecture | None:
    """Granite's multipliers; a softmax over the chosen is one over all, divided by the sum of the chosen."""
    found = granite(config)
    experts = replace(
        of_experts(config, "num_local_experts", "intermediate_size", True),
        names=("block_sparse_moe",),
        routers=("router.layer", "router"),
        fused=(("input_linear.weight", "output_linear.weight"), ("experts.gate_up_proj", "experts.down_proj")),
    )
    return None if found is None else replace(found, experts=experts)


def glm4_moe(config: Config) -> Architecture | None:
    """Sigmoids choose, with a correction and in groups; some experts are everyone's; the first layers are dense."""
    number = total(config, "n_routed_experts", "num_local_experts")
    experts = of_experts(config, number, "moe_intermediate_size", bool(config.get("norm_topk_prob", True)))
    return llama(
        config,
        activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        query_key_norm=bool(config.get("use_qk_norm", False)),
        experts=replace(
            experts,
            scoring="sigmoid",
            correction="gate.e_score_correction_bias",
            groups=in_groups(config, experts, 2),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            shared=count(config, "moe_intermediate_size") * config.get("n_shared_experts", 1),
            **in_shared_experts(),
        ),
        dense_layers=tuple(range(min(config.get("first_k_dense_replace", 1), count(config, "num_hidden_layers")))),
    )


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


def minimax_m2(config: Config) -> Architecture | None:
    """Sigmoids choose, with a correction; queries and keys are normed as one vector."""
    number = total(config, "num_local_experts", "num_experts")
    experts = of_experts(config, number, "intermediate_size", True)
    return llama(
        config,
        activation(config),
        query_key_norm=True,
        query_key_span="heads",
        experts=replace(experts, scoring="sigmoid", correction="e_score_correction_bias"),
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
