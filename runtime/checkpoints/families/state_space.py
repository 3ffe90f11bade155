"""Families with state spaces (Mamba-2), alone, between attention and MLPs, or beside attention: one function each.

transformers bounds a step only where it reads many rows at once, and a single row's not; here all rows' are bounded.
"""

import math
from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, layer_types, llama, number
from runtime.checkpoints.families.granite import SHARED, granite, granitemoeshared
from runtime.checkpoints.families.mixtures import in_groups, in_shared_experts, of_experts, total
from runtime.checkpoints.mixers import Mamba, Mixer
from runtime.checkpoints.record import Architecture, Names
from runtime.errors import UserError

_MAMBA2 = Names(embedding="backbone.embeddings", block="backbone.layers.{}", norm="backbone.norm_f", input_norm="norm")
# Blocks of one part each, which is called `mixer` whatever it is.
_NEMOTRON_H = replace(
    _MAMBA2,
    mlp_norm="norm",
    qkv=tuple(f"mixer.{part}_proj" for part in "qkv"),
    out="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
)
_FED_FORWARD = Names(
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
# What layers are called, and what they were called once; and the letters of Nemotron-H's pattern.
_KINDS: dict[str, Mixer] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
}
_NOTHING: Mixer = "nothing"
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# Of a text without positions: a million tokens, which caches are planned by.
_NO_END = 1 << 20


def _numbers(config: Config, key: str, expected: int) -> tuple[float, ...]:
    """So many numbers. Raises UserError for anything else; without the key they are 1."""
    found = config.get(key)
    if found is None:
        return (1.0,) * expected
    if not isinstance(found, list | tuple) or len(found) != expected:
        raise UserError(f"config.json: {key} must be {expected} numbers, found {str(found)[:60]}")
    return tuple(number(value, key) for value in found)


def _limits(config: Config) -> tuple[float, float]:
    key = "time_step_limit"
    low, high = _numbers(config, key, 2) if config.get(key) else (0.0, math.inf)
    if low > high:
        raise UserError(f"config.json: time_step_limit must be the lower and the upper, found {low} and {high}")
    return low, high


def _mamba(config: Config, sizes: tuple[str, str, str, str], taps: str, dim: int, **more: Any) -> Mamba | None:
    """By the keys that have the number of heads, groups and dimensions of B and the activation; None for another."""
    heads, groups, state = (count(config, key) for key in sizes[:3])
    if heads % groups or count(config, taps) < 2:
        raise UserError(
            f"config.json: {sizes[0]} must be a multiple of {sizes[1]}, found {heads} and {groups}, and {taps} 2 or"
            f" more, found {config[taps]}"
        )
    if activation(config, key=sizes[3]) != "silu":
        return None
    return Mamba(heads, dim, groups, state, config[taps], **more)


def _layered(found: Architecture | None, how: Mamba | None, mixers: list[Mixer], **more: Any) -> Architecture | None:
    """With state spaces in these layers."""
    return None if found is None or how is None else replace(found, mixers=tuple(mixers), mamba=how, **more)


def mamba2(config: Config) -> Architecture | None:
    """State spaces alone."""
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim")
    layers, hidden, vocab, dim = (count(config, key) for key in keys)
    eps = config.get("layer_norm_epsilon", 1e-5)
    sizes = ("num_heads", "n_groups", "state_size", "hidden_act")
    how = _mamba(config, sizes, "conv_kernel", dim, limits=_limits(config), name="mixer")
    found = Architecture(
        model_type="mamba2",
        layers=layers,
        hidden=hidden,
        heads=0,
        kv_heads=0,
        head_dim=0,
        intermediate=0,
        vocab=vocab,
        max_positions=_NO_END,
        norm_eps=eps,
        tied=bool(config.get("tie_word_embeddings", False)),
        activation="silu",
        names=_MAMBA2,
        windows=(None,) * layers,
        rotary=(None,) * layers,
        without_mlp=tuple(range(layers)),
    )
    return _layered(found, how, ["mamba"] * layers)


def _parts(config: Config) -> list[str]:
    """What each of Nemotron-H's blocks is, of which older files have a letter."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if not kinds:
        kinds = [_LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or "ME*-"]
    known = {*_KINDS, "mlp", "moe"}
    if not isinstance(kinds, list) or (other := sorted({str(kind) for kind in kinds} - known)):
        found = other if isinstance(kinds, list) else str(kinds)[:60]
        raise UserError(f"config.json: layers_block_type must be a list of {', '.join(sorted(known))}, found {found}")
    return [str(kind) for kind in kinds]


def nemotron_h(config: Config) -> Architecture | None:
    """Blocks of one part each: a state space, attention without positions, an MLP without a gate, or a mixture."""
    parts = _parts(config)
    layers, experts = len(parts), None
    if "moe" in parts:
        if config.get("moe_latent_size") is not None:
            return None
        experts = of_experts(
            config,
            total(config, "n_routed_experts", "num_local_experts"),
            "moe_intermediate_size",
            bool(config.get("norm_topk_prob", True)),
        )
        experts = replace(
            experts,
            names=("mixer",),
            scoring="sigmoid",
            correction="gate.e_score_correction_bias",
            groups=in_groups(config, experts, 2),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            shared=count(config, "moe_shared_expert_intermediate_size"),
            **in_shared_experts("mixer", gated=False),
            fused=(("experts.up_proj", "experts.down_proj"),),
        )
    mixers = [_KINDS.get(part, _NOTHING) for part in parts]
    how = _mamba(
        config,
        ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_hidden_act"),
        "conv_kernel",
        count(config, "mamba_head_dim"),
        limits=(number(config.get("time_step_min", 0.001), "time_step_min"), math.inf),
        name="mixer",
    )
    found = llama(
        config | {"num_hidden_layers": layers},
        activation(config, "relu2", "mlp_hidden_act"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        max_positions=config.get("max_position_embeddings", 4096),
        names=_NEMOTRON_H,
        tied=False,  # whatever config.json says of it
        gated=False,
        rotary=(None,) * layers,
        experts=experts,
        dense_layers=tuple(n for n, part in enumerate(parts) if part != "moe"),
        without_mlp=tuple(n for n, mixer in enumerate(mixers) if mixer != "nothing"),
    )
    return _layered(found, how, mixers)


def _expanded(config: Config, values: int) -> int:
    """Dimensions of a head, of a state space of so many `values`. Raises UserError where they are no whole number."""
    heads, dim = count(config, "mamba_n_heads"), config.get("mamba_d_head") or "auto"
    if (values // heads if dim == "auto" else dim) * heads != values:
        raise UserError(
            f"config.json: mamba_n_heads heads of mamba_d_head must be {values} channels together, found {heads}"
            f" of {dim}"
        )
    return values // heads


def granitemoehybrid(config: Config) -> Architecture | None:
    """Granite's multipliers, state spaces, attention that need not rotate; an MLP, alone or beside a mixture."""
    layers, shared = count(config, "num_hidden_layers"), count(config, "shared_intermediate_size")
    kinds = layer_types(config) or config.get("layers_block_type") or ["linear_attention"] * layers
    if (other := sorted(set(kinds) - set(_KINDS))) or len(kinds) != layers:
        raise UserError(
            f"config.json: layer_types must be linear_attention or full_attention for each of {layers} layers, found"
            f" {other or len(kinds)}"
        )
    rotary = () if config.get("position_embedding_type") == "rope" else (None,) * layers
    found = granitemoeshared(config) if config.get("num_local_experts", 8) else granite(config)
    if found is None:
        return None
    values = (config.get("mamba_expand") or 2) * found.hidden
    sizes = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "hidden_act")
    how = _mamba(config, sizes, "mamba_d_conv", _expanded(config, values), limits=_limits(config))
    return _layered(found, how, [_KINDS[kind] for kind in kinds], intermediate=shared, names=SHARED, rotary=rotary)


def bamba(config: Config) -> Architecture | None:
    """State spaces, attention in some layers, an MLP in each."""
    layers, attending = count(config, "num_hidden_layers"), config.get("attn_layer_indices") or []
    values = (config.get("mamba_expand") or 2) * count(config, "hidden_size")
    sizes = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "hidden_act")
    how = _mamba(config, sizes, "mamba_d_conv", _expanded(config, values), limits=_limits(config))
    found = llama(config, activation(config), names=_FED_FORWARD, norm_eps=config.get("rms_norm_eps", 1e-5))
    return _layered(found, how, ["attention" if n in attending else "mamba" for n in range(layers)])


def falcon_h1(config: Config) -> Architecture | None:
    """Attention and a state space side by side in each layer, and multipliers of nearly all that is made."""
    hidden, layers = count(config, "hidden_size"), count(config, "num_hidden_layers")
    values = config.get("mamba_d_ssm") or (config.get("mamba_expand") or 2) * hidden
    order = "plain" if config.get("mamba_norm_before_gate", True) else "gated"
    one: Any = {key: _numbers({key: [config[key]]}, key, 1)[0] for key in config if key.endswith("_multiplier")}
    how = _mamba(
        config,
        ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "hidden_act"),
        "mamba_d_conv",
        _expanded(config, values),
        limits=_limits(config),
        norm=order if config.get("mamba_rms_norm", False) else "none",
        read=one.get("ssm_in_multiplier", 1.0),
        added=one.get("ssm_out_multiplier", 1.0),
        multipliers=_numbers(config, "ssm_multipliers", 5),
    )
    found = llama(
        config,
        activation(config),
        names=_FED_FORWARD,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        embedding_scale=one.get("embedding_multiplier", 1.0),
        logits_scale=one.get("lm_head_multiplier", 1.0),
        attention_scales=(one.get("attention_in_multiplier", 1.0), one.get("attention_out_multiplier", 1.0)),
        mlp_scales=_numbers(config, "mlp_multipliers", 2),
    )
    if found is None:
        return None
    # A multiplier of keys is one of scores.
    scale = found.head_dim**-0.5 * one.get("key_multiplier", 1.0)
    return _layered(found, how, ["attention and mamba"] * layers, attention_scale=scale)
