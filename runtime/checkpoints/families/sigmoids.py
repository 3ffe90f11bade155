"""Families whose experts are chosen by sigmoids, with a correction, as DeepSeek-V3's are: one function each."""

from dataclasses import replace

from runtime.checkpoints.families.common import Config, activation, count, given, layer_types, llama, windows
from runtime.checkpoints.families.dense import exaone4
from runtime.checkpoints.families.mixtures import dense_among, in_groups, in_shared_experts, of_experts, total
from runtime.checkpoints.record import Architecture, Experts, Names


def sigmoids(config: Config, key: str, renormalize: bool, shared: str = "n_shared_experts") -> Experts:
    """DeepSeek-V3's experts: sigmoids choose, with a correction and in groups; some experts are everyone's.

    key, shared  the keys that have how many there are of each.
    """
    experts = of_experts(config, key, "moe_intermediate_size", bool(config.get("norm_topk_prob", renormalize)))
    return replace(
        experts,
        scoring="sigmoid",
        correction="gate.e_score_correction_bias",
        groups=in_groups(config, experts, 2),
        scale=float(given(config, "routed_scaling_factor", 1.0)),
        shared=count(config, "moe_intermediate_size") * given(config, shared, 1),
        **in_shared_experts(),
    )


def _first(config: Config, default: int) -> tuple[int, ...]:
    """The first layers, which are dense."""
    return tuple(range(min(given(config, "first_k_dense_replace", default), count(config, "num_hidden_layers"))))


def glm4_moe(config: Config) -> Architecture | None:
    """DeepSeek-V3's experts; the first layers are dense."""
    return llama(
        config,
        activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        query_key_norm=bool(config.get("use_qk_norm", False)),
        experts=sigmoids(config, total(config, "n_routed_experts", "num_local_experts"), True),
        dense_layers=_first(config, 1),
    )


def solar_open(config: Config) -> Architecture | None:
    """The same in every layer."""
    return glm4_moe({"first_k_dense_replace": 0} | config)


def dots1(config: Config) -> Architecture | None:
    """The same, with normed queries and keys, and windows."""
    return llama(
        config,
        activation(config),
        query_key_norm=True,
        experts=sigmoids(config, total(config, "n_routed_experts", "num_local_experts"), False),
        dense_layers=_first(config, 0),
        windows=windows(config) if layer_types(config) else (None,) * count(config, "num_hidden_layers"),
    )


def exaone_moe(config: Config) -> Architecture | None:
    """EXAONE 4's attention between norms before it and before DeepSeek-V3's experts."""
    found = exaone4(config)
    experts = sigmoids(config, total(config, "num_experts", "num_local_experts"), True, "num_shared_experts")
    return (
        None
        if found is None
        else replace(
            found,
            names=Names(),
            experts=replace(experts, correction="e_score_correction_bias"),
            dense_layers=dense_among(config),
        )
    )


def minimax_m2(config: Config) -> Architecture | None:
    """Sigmoids choose, with a correction; queries and keys are normed as one vector."""
    key = total(config, "num_local_experts", "num_experts")
    experts = of_experts(config, key, "intermediate_size", True)
    return llama(
        config,
        activation(config),
        query_key_norm=True,
        query_key_span="heads",
        experts=replace(experts, scoring="sigmoid", correction="e_score_correction_bias"),
    )


def hy_v3(config: Config) -> Architecture | None:
    """Normed queries and keys; the first layers are dense."""
    key = total(config, "num_experts", "num_local_experts")
    experts = sigmoids(config | {"n_group": 1}, key, True, "num_shared_experts")
    return llama(
        config,
        activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        query_key_norm=True,
        experts=replace(
            experts,
            routers=("router.gate",),
            correction="expert_bias",
            scale=float(given(config, "router_scaling_factor", 1.0)),
            **in_shared_experts(name="shared_mlp"),
        ),
        dense_layers=dense_among(config, first=1),
    )


_AFMOE = Names(
    attention_gate="self_attn.gate_proj",
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    output_norm="post_mlp_layernorm",
)


def afmoe(config: Config) -> Architecture | None:
    """Norms around, gates of what attention mixes; layers with a window rotate, the others have no positions."""
    layers = count(config, "num_hidden_layers")
    kinds = layer_types(config)
    if kinds is None:
        return None
    # Groups of experts are in its configuration and not in its router.
    experts = sigmoids(config | {"n_group": 1}, total(config, "num_experts", "num_local_experts"), True)
    scale, shared = float(given(config, "route_scale", 1.0)), config.get("num_shared_experts") or 0
    return llama(
        config,
        activation(config),
        names=_AFMOE,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        embedding_scale=count(config, "hidden_size") ** 0.5 if config.get("mup_enabled") else 1.0,
        query_key_norm=True,
        rotary=tuple("" if kind == "sliding_attention" else None for kind in kinds),
        windows=windows(config),
        experts=replace(
            experts,
            routers=("router.gate",),
            correction="expert_bias",
            scale=scale,
            shared=count(config, "moe_intermediate_size") * shared,
        ),
        dense_layers=tuple(range(min(config.get("num_dense_layers") or 0, layers))),
    )
