"""Families of which some layers carry a state in attention's place: one function each."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, layer_types, llama, rotary_sets, windows
from runtime.checkpoints.families.mixtures import of_experts, qwen2_moe
from runtime.checkpoints.mixers import Convolution, DeltaNet, Mixer
from runtime.checkpoints.record import Architecture, Names
from runtime.errors import UserError

_LFM2 = Names(
    norm="model.embedding_norm",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    out="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)

# What a delta rule reads, a layer for each part of it.
_APART = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))


def _of_today(config: Config) -> Config:
    """With today's keys where the first LFM2's config.json has others; as in transformers, these win."""
    out = dict(config)
    out["intermediate_size"] = config.get("block_ff_dim", config.get("intermediate_size"))
    out["tie_word_embeddings"] = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    attending = config.get("full_attn_idxs")
    if not config.get("layer_types") and attending is not None:
        layers = range(count(config, "num_hidden_layers"))
        out["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]
    return out


def _channels(config: Config) -> int:
    """Of LFM2's MLP: two thirds, times a factor, rounded up."""
    size = count(config, "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor, multiple = 2 * size // 3, config.get("block_ffn_dim_multiplier"), count(config, "block_multiple_of")
    size = size if factor is None else int(factor * size)
    return -(-size // multiple) * multiple


def _convolved(config: Config, **more: Any) -> Architecture | None:
    """Short convolutions, and attention in some layers."""
    kinds, taps = layer_types(config) or [], count(config, "conv_L_cache")
    if not kinds or taps < 2:
        return None
    if (other := set(kinds) - {"conv", "full_attention"}) or set(kinds) == {"conv"}:
        raise UserError(
            f"config.json: layer_types must be conv and full_attention, found {sorted(other or set(kinds))}"
        )
    mixers: tuple[Mixer, ...] = tuple("convolution" if kind == "conv" else "attention" for kind in kinds)
    return llama(
        config,
        "silu",
        norm_eps=config.get("norm_eps", 1e-5),
        query_key_norm=True,
        rotary=tuple("" if mixer == "attention" else None for mixer in mixers),
        names=_LFM2,
        mixers=mixers,
        convolution=Convolution(taps),
        **more,
    )


def lfm2(config: Config) -> Architecture | None:
    """Dense."""
    config = _of_today(config)
    return _convolved(config, intermediate=_channels(config))


def lfm2_moe(config: Config) -> Architecture | None:
    """Sigmoids choose, with a correction. transformers adds 1e-6 to what it divides the shares by; here nothing is."""
    config = _of_today(config)
    layers, dense = count(config, "num_hidden_layers"), config.get("num_dense_layers")
    experts = of_experts(config, "num_experts", "moe_intermediate_size", bool(config.get("norm_topk_prob", True)))
    return _convolved(
        config,
        experts=replace(
            experts,
            names=("feed_forward",),
            scoring="sigmoid",
            correction="expert_bias" if config.get("use_expert_bias", True) else None,
            scale=config.get("routed_scaling_factor", 1.0),
        ),
        dense_layers=tuple(range(min(2 if dense is None else dense, layers))),
    )


def lfm3(config: Config) -> Architecture | None:
    """Norms around, windows in some layers, a rotation for each kind, a gate for each head."""
    kinds, taps = layer_types(config) or [], count(config, "conv_L_cache")
    if not kinds or taps < 2:
        return None
    known = {"conv", "full_attention", "sliding_attention"}
    if (other := set(kinds) - known) or set(kinds) == {"conv"}:
        raise UserError(
            f"config.json: layer_types must be {', '.join(sorted(known))}, found {sorted(other or set(kinds))}"
        )
    names = replace(_LFM2, out="self_attn.o_proj", query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    if config.get("use_sandwich_norm", True):
        names = replace(names, attention_norm="post_operator_norm", output_norm="post_ffn_norm")
    if config.get("use_attention_gate", True):
        names = replace(names, attention_gate="self_attn.gate_proj")
    return llama(
        config,
        "silu",
        norm_eps=config.get("norm_eps", 1e-5),
        tied=bool(config.get("tie_word_embeddings", True)),
        query_key_norm=True,
        rotary=rotary_sets(config),
        windows=windows(config),
        names=names,
        mixers=tuple("convolution" if kind == "conv" else "attention" for kind in kinds),
        convolution=Convolution(taps),
        gate_by_head=True,
    )


def qwen3_next(config: Config) -> Architecture | None:
    """Gated delta rules, and in some layers attention with a gate on what it mixes; Qwen2's mixture."""
    found = qwen2_moe({"norm_topk_prob": True, "partial_rotary_factor": 0.25} | config)
    return None if found is None else _with_deltas(config, found, DeltaNet(*_heads(config)))


def _heads(config: Config) -> tuple[int, int, int, int, int]:
    """Key heads, value heads, their dimensions, and taps. Raises UserError where they do not fit each other."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    keys, values, key, value, taps = (count(config, f"linear_{name}") for name in names)
    if values % keys or taps < 2:
        raise UserError(
            "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads, found"
            f" {values} and {keys}, and linear_conv_kernel_dim 2 or more, found {taps}"
        )
    return keys, values, key, value, taps


def _with_deltas(config: Config, found: Architecture, how: DeltaNet) -> Architecture | None:
    kinds = layer_types(config)
    if kinds is None:
        every = config.get("full_attention_interval") or 4
        kinds = ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(found.layers)]
    if found.activation != "silu":
        return None
    if (other := set(kinds) - {"linear_attention", "full_attention"}) or "full_attention" not in kinds:
        raise UserError(
            f"config.json: layer_types must be linear_attention and full_attention, found {sorted(other or set(kinds))}"
        )
    mixers: tuple[Mixer, ...] = tuple("delta" if kind == "linear_attention" else "attention" for kind in kinds)
    return replace(
        found,
        windows=(None,) * found.layers,
        norm_offset=1.0,
        query_key_norm=True,
        output_gate=True,
        rotary=tuple("" if mixer == "attention" else None for mixer in mixers),
        mixers=mixers,
        delta=how,
    )


def qwen3_5(config: Config) -> Architecture | None:
    """The same with a dense MLP, and a layer for each part of what the delta rule reads."""
    found = llama({"partial_rotary_factor": 0.25} | config, activation(config))
    how = DeltaNet(*_heads(config), _APART, grouped=False)
    return None if found is None else _with_deltas(config, found, how)


def qwen3_5_moe(config: Config) -> Architecture | None:
    """That of Qwen2's mixture, in all layers."""
    found = qwen2_moe({"norm_topk_prob": True, "partial_rotary_factor": 0.25} | config)
    how = DeltaNet(*_heads(config), _APART, grouped=False)
    return None if found is None else _with_deltas(config, found, how)
