"""Families from before Llama: layer norms, biases, no gates, tensors and keys of other names."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, llama, windows
from runtime.checkpoints.record import Architecture, Names
from runtime.errors import UserError

_NEOX = Names(
    embedding="gpt_neox.embed_in",
    block="gpt_neox.layers.{}",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_GPT2 = Names(
    embedding="transformer.wte",
    block="transformer.h.{}",
    norm="transformer.ln_f",
    positions="transformer.wpe",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)
_GPT_NEO = replace(
    _GPT2,
    qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
    out="attn.attention.out_proj",
)
_GPTJ = replace(
    _GPT2,
    positions=None,
    mlp_norm="ln_1",
    qkv=tuple(f"attn.{part}_proj" for part in "qkv"),
    out="attn.out_proj",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
)
_OPT = Names(
    embedding="model.decoder.embed_tokens",
    block="model.decoder.layers.{}",
    norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    out="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
)
_FALCON = replace(
    _NEOX,
    embedding="transformer.word_embeddings",
    block="transformer.h.{}",
    norm="transformer.ln_f",
    head="lm_head",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
)


def _gpt(config: Config) -> Config:
    """GPT-2's keys under the names that the others have."""
    hidden = config.get("n_embd", config.get("hidden_size"))
    return config | {
        "hidden_size": hidden,
        "num_attention_heads": config.get("n_head", config.get("num_attention_heads")),
        "num_hidden_layers": config.get("n_layer", config.get("num_hidden_layers")),
        "intermediate_size": config.get("n_inner") or 4 * (hidden or 0),
        "max_position_embeddings": config.get("n_positions", config.get("max_position_embeddings", 1024)),
    }


def _of_gpt(told: Config, act: str, names: Names, **more: Any) -> Architecture | None:
    """GPT-2's line: layer norms, no gates, learned positions, a tied head; `more` says what differs."""
    shared = {
        "names": names,
        "norm": "layer",
        "norm_eps": told.get("layer_norm_epsilon", 1e-5),
        "gated": False,
        "tied": bool(told.get("tie_word_embeddings", True)),
        "rotary": (None,) * count(told, "num_hidden_layers"),
    }
    return llama(told, activation(told, act, "activation_function"), **(shared | more))


def gpt2(config: Config) -> Architecture | None:
    """Matrices are stored (inputs, outputs)."""
    plain = config.get("scale_attn_weights", True) and not config.get("scale_attn_by_inverse_layer_idx")
    if not plain or config.get("add_cross_attention"):
        return None
    return _of_gpt(_gpt(config), "gelu_new", _GPT2, transposed=True)


def gpt_bigcode(config: Config) -> Architecture | None:
    """StarCoder: plain matrices, one key head; or each head's queries, keys and values together."""
    if not config.get("scale_attn_weights", True) or config.get("add_cross_attention"):
        return None
    told, multi = _gpt(config), bool(config.get("multi_query", True))
    told |= {"num_key_value_heads": 1 if multi else told["num_attention_heads"]}
    return _of_gpt(told, "gelu_pytorch_tanh", _GPT2, grouped_rows=not multi)


def gpt_neo(config: Config) -> Architecture | None:
    """Scores are not divided by anything; windows in every other layer."""
    layers = count(config | {"num_layers": config.get("num_layers", config.get("num_hidden_layers"))}, "num_layers")
    kinds = config.get("attention_layers") or []
    if not kinds:
        for names, times in config.get("attention_types") or [[["global", "local"], -(-layers // 2)]]:
            kinds = [*kinds, *list(names) * times]
    if len(kinds) != layers:
        raise UserError(f"config.json: attention_types must tell of {layers} layers, found {len(kinds)}")
    told = config | {"num_hidden_layers": layers, "num_attention_heads": config.get("num_heads"), "layer_types": kinds}
    seen = windows(told, "local", "window_size")
    return _of_gpt(told, "gelu_new", _GPT_NEO, attention_scale=1.0, windows=seen)


def gptj(config: Config) -> Architecture | None:
    """Attention and MLP side by side; neighbours of the first `rotary_dim` dimensions rotate."""
    told, rotated = _gpt(config), config.get("rotary_dim", 64)
    # Without it a whole head rotates, by frequencies of as many dimensions as the model has.
    if rotated is None:
        return None
    if rotated % 2 or rotated * count(told, "num_attention_heads") > count(told, "hidden_size"):
        raise UserError(f"config.json: rotary_dim must be an even number of dimensions of a head, found {rotated}")
    tied = bool(config.get("tie_word_embeddings", False))
    return _of_gpt(told, "gelu_new", _GPTJ, tied=tied, parallel=True, rotary=(), rotary_neighbours=True)


def opt(config: Config) -> Architecture | None:
    """Learned positions, which begin with the third."""
    plain = config.get("do_layer_norm_before", True) and config.get("layer_norm_elementwise_affine", True)
    inner = config.get("word_embed_proj_dim") or config.get("hidden_size")
    if not plain or inner != config.get("hidden_size") or config.get("_remove_final_layer_norm"):
        return None
    return llama(
        config | {"num_key_value_heads": None},
        activation(config, "relu", "activation_function"),
        names=_OPT,
        norm="layer",
        norm_eps=1e-5,
        gated=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        intermediate=count(config, "ffn_dim"),
        first_position=2,
        rotary=(None,) * count(config, "num_hidden_layers"),
    )


def gpt_neox(config: Config) -> Architecture | None:
    """Attention and MLP side by side in most; queries, keys and values head by head in one layer."""
    return llama(
        config | {"num_key_value_heads": None},
        activation(config, "gelu"),
        names=_NEOX,
        norm="layer",
        norm_eps=config.get("layer_norm_eps", 1e-5),
        parallel=bool(config.get("use_parallel_residual", True)),
        grouped_rows=True,
        gated=False,
    )


def falcon(config: Config) -> Architecture | None:
    """Three generations: heads that share one key head, groups of heads, every head its own."""
    if config.get("alibi"):
        return None
    new, multi = bool(config.get("new_decoder_architecture")), bool(config.get("multi_query", True))
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_kv_heads") or heads if new or not multi else 1
    parallel = new or bool(config.get("parallel_attn", True))
    names = _FALCON if not parallel else replace(_FALCON, mlp_norm="input_layernorm")
    if new and (config.get("num_ln_in_parallel_attn") or 2) == 2:
        names = replace(_FALCON, input_norm="ln_attn", mlp_norm="ln_mlp")
    return llama(
        config | {"num_key_value_heads": kv_heads},
        activation(config, "gelu", "activation"),
        names=names,
        norm="layer",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        parallel=parallel,
        grouped_rows=new or not multi,
        gated=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        intermediate=config.get("ffn_hidden_size") or 4 * (config.get("hidden_size") or 0),
    )
