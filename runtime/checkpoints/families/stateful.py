"""Families of which some layers carry a state in attention's place: one function each."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, count, layer_types, llama
from runtime.checkpoints.families.mixtures import of_experts
from runtime.checkpoints.record import Architecture, Convolution, Mixer, Names
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
