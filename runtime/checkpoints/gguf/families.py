"""What each of llama.cpp's architectures says in keys of its own, and what it computes without saying, as config.json
has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.checkpoints.gguf import state_spaces
from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.reader import damaged
from runtime.checkpoints.gguf.shared_keys import (
    Config,
    biases,
    convolutions,
    deltas,
    experts,
    latent,
    multipliers,
    sigmoids,
    window,
)


@dataclass(frozen=True)
class Family:
    """transformers' configuration of an architecture: what llama.cpp has no key for is `fixed`, the rest says `more`.

    eps    transformers' key of the norms' epsilon; `rms` norms by the root mean square have another key there.
    mixed  layers without attention have no key heads, and those without an MLP no channels.
    attends  it has attention.
    sized  config.json has the size of a head.
    """

    model_type: str
    more: Callable[[Keys, Config], Config] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    rms: bool = True
    mixed: bool = False
    sized: bool = True
    attends: bool = True


def _llama(keys: Keys, config: Config) -> Config:
    if keys.get("expert_count") is not None:
        return {"model_type": "mixtral", "sliding_window": None} | experts(keys, "num_local_experts")
    return biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")


def _qwen3moe(keys: Keys, config: Config) -> Config:
    return experts(keys) | {"moe_intermediate_size": keys.whole("expert_feed_forward_length")}


def _qwen2moe(keys: Keys, config: Config) -> Config:
    return _qwen3moe(keys, config) | {
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def _phi3(keys: Keys, config: Config) -> Config:
    window = "attention.sliding_window"
    return {"sliding_window": None if keys.get(window) is None else keys.whole(window)}


def _scalar(config: Config, layers: int) -> int:
    """What Gemma's scores are divided by the root of: in models of so many layers it is not a head's size."""
    if config["num_hidden_layers"] == layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(keys: Keys, config: Config) -> Config:
    return window(keys, config, 2, 4096) | {
        "query_pre_attn_scalar": _scalar(config, 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: Config) -> Config:
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    windowed = keys.get("attention.sliding_window") is not None
    kinds = window(keys, config, 6) if windowed else {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return kinds | {
        "query_pre_attn_scalar": _scalar(config, 62),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]},
    }


def _gpt_oss(keys: Keys, config: Config) -> Config:
    size = {"intermediate_size": keys.whole("expert_feed_forward_length")}
    return window(keys, config, 2) | experts(keys, "num_local_experts") | size


def _granite(keys: Keys, config: Config) -> Config:
    return multipliers(keys, config) | biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")


def _granitemoe(keys: Keys, config: Config) -> Config:
    return _granite(keys, config) | experts(keys, "num_local_experts")


def _olmo2(keys: Keys, config: Config) -> Config:
    if keys.get("attention.sliding_window") is None:
        return {}
    full = config["rope_parameters"]
    # Both rotate at one base.
    local = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    sets = {"sliding_attention": local, "full_attention": full}
    return {"model_type": "olmo3", "rope_parameters": sets} | window(keys, config, 4)


def _smollm3(keys: Keys, config: Config) -> Config:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]}


def _attention_bias(keys: Keys, config: Config) -> Config:
    return biases(keys, attention_bias="attn_q")


def _mistral3(keys: Keys, config: Config) -> Config:
    scale = keys.real("attention.temperature_scale", 0.0)
    if not scale:
        return {}
    start = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    more = {"llama_4_scaling_beta": scale, "original_max_position_embeddings": start}
    return {"rope_parameters": config["rope_parameters"] | more}


def _lfm2moe(keys: Keys, config: Config) -> Config:
    found = convolutions(keys, config)
    del found["block_ff_dim"]
    return (
        found
        | experts(keys)
        | {
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
            "num_dense_layers": int(keys.real("leading_dense_block_count", 0)),
            "norm_topk_prob": True,
            "use_expert_bias": keys.has(".exp_probs_b.bias"),
        }
    )


def _qwen3next(keys: Keys, config: Config) -> Config:
    return deltas(keys, config) | _qwen2moe(keys, config)


# llama.cpp slides in models of so many layers, and in no others.
_EXAONE_32B = 64


def _exaone4(keys: Keys, config: Config) -> Config:
    if config["num_hidden_layers"] != _EXAONE_32B:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return window(keys, config, 4, 4096)


def _cohere2(keys: Keys, config: Config) -> Config:
    return window(keys, config, 4) | {"logit_scale": keys.number("logit_scale")}


def _stablelm(keys: Keys, config: Config) -> Config:
    return {
        "use_parallel_residual": not keys.has(".ffn_norm.weight"),
        "qk_layernorm": keys.has(".attn_q_norm.weight"),
    } | biases(keys, use_qkv_bias="attn_q")


def _gpt2(keys: Keys, config: Config) -> Config:
    return {
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config["intermediate_size"],
    }


# Ours, where a model's activation is not its architecture's usual one; llama.cpp computes one of them for both.
ACTIVATION = "hidden_activation"


def _gpt_neox(keys: Keys, config: Config) -> Config:
    return {
        "use_parallel_residual": keys.truth("use_parallel_residual", True),
        "hidden_act": keys.get(ACTIVATION, "gelu"),
        "attention_bias": keys.has(".attn_qkv.bias"),
    }


def _falcon(keys: Keys, config: Config) -> Config:
    kv_heads, two = config["num_key_value_heads"], keys.has(".attn_norm_2.weight")
    # The first, of 7B, has one norm; groups of heads came with two.
    return {
        "new_decoder_architecture": kv_heads > 1 or two,
        "num_kv_heads": kv_heads,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "alibi": False,
        "bias": False,
        "activation": keys.get(ACTIVATION, "gelu"),
        "ffn_hidden_size": config["intermediate_size"],
    }


def _nemotron(keys: Keys, config: Config) -> Config:
    return biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")


def _glm4moe(keys: Keys, config: Config) -> Config:
    normed = {"use_qk_norm": keys.has(".attn_q_norm.weight")}
    return sigmoids(keys, config) | normed | biases(keys, attention_bias="attn_q")


def _dots1(keys: Keys, config: Config) -> Config:
    # Each head has keys of its own.
    return sigmoids(keys, config) | {"num_key_value_heads": config["num_attention_heads"]}


def _exaone_moe(keys: Keys, config: Config) -> Config:
    found, layers = sigmoids(keys, config), config["num_hidden_layers"]
    dense = found.pop("first_k_dense_replace")
    return (
        window(keys, config, 4)
        | found
        | {
            "num_experts": found.pop("n_routed_experts"),
            "num_shared_experts": found.pop("n_shared_experts"),
            "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        }
    )


def _ernie_moe(keys: Keys, config: Config) -> Config:
    found, hidden = experts(keys, "moe_num_experts"), keys.whole("expert_feed_forward_length")
    shared = keys.get("expert_shared_feed_forward_length", 0) or 0
    return found | {
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_intermediate_size": hidden,
        "moe_num_shared_experts": keys.whole("expert_shared_feed_forward_length") // hidden if shared else 0,
        "moe_layer_start_index": int(keys.real("leading_dense_block_count", 0)),
        "moe_layer_interval": keys.whole("interleave_moe_layer_step"),
        "use_bias": False,
    }


def _hunyuan_moe(keys: Keys, config: Config) -> Config:
    found = experts(keys)
    return found | {"moe_topk": found.pop("num_experts_per_tok")} | biases(keys, attention_bias="attn_q")


# What llama.cpp has of Llama 4 as constants: tokens of a chunk, layers of which the last does not rotate, and the
# number of experts beside which queries and keys are not normed.
_CHUNK, _EVERY_ROTATES, _UNNORMED = 8192, 4, 128


def _llama4(keys: Keys, config: Config) -> Config:
    if keys.get("attention.sliding_window") == 0:
        raise damaged(
            keys.shown, f"{keys.architecture}.attention.sliding_window is 0, and without chunks it is not run"
        )
    layers, step = config["num_hidden_layers"], keys.whole("interleave_moe_layer_step")
    found = window(keys, config, _EVERY_ROTATES, _CHUNK)
    kinds = ["chunked_attention" if kind == "sliding_attention" else kind for kind in found["layer_types"]]
    count = experts(keys, "num_local_experts")
    return count | {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "moe_layers": list(range(step - 1, layers, step)),
        "no_rope_layers": [int((layer + 1) % _EVERY_ROTATES != 0) for layer in range(layers)],
        "layer_types": kinds,
        "use_qk_norm": count["num_local_experts"] != _UNNORMED,
    }


def _minimax(keys: Keys, config: Config) -> Config:
    # Feed forward of a layer is that of its experts.
    return experts(keys, "num_local_experts") | {"intermediate_size": keys.whole("expert_feed_forward_length")}


def _olmoe(keys: Keys, config: Config) -> Config:
    # Each head has keys of its own.
    return experts(keys) | {"num_key_value_heads": config["num_attention_heads"]}


_TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
# Of a mixture in every layer; whether llama.cpp divides the chosen experts' shares by their sum is no key either.
_EVERY = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_NEMOTRON_H = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_bias": False}
_UNMULTIPLIED: Config = {
    f"{name}_multiplier": 1.0
    for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
} | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
_UNBIASED = {"conv_bias": False}
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _llama),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, {"norm_topk_prob": True} | _EVERY),
    "phi3": Family("phi3", _phi3),
    "gemma": Family("gemma", None, _TANH),
    "gemma2": Family("gemma2", _gemma2, _TANH),
    "gemma3": Family("gemma3_text", _gemma3, _TANH),
    "qwen2moe": Family("qwen2_moe", _qwen2moe, {"norm_topk_prob": False} | _EVERY),
    "gpt-oss": Family("gpt_oss", _gpt_oss, {"swiglu_limit": 7.0, "attention_bias": True}),
    "granite": Family("granite", _granite),
    "granitemoe": Family("granitemoe", _granitemoe),
    "granitehybrid": Family("granitemoehybrid", state_spaces.granitehybrid, mixed=True),
    "mamba2": Family("mamba2", state_spaces.mamba2, {"use_bias": False}, "layer_norm_epsilon", attends=False),
    "falcon-h1": Family("falcon_h1", state_spaces.falcon_h1, {"mamba_norm_before_gate": False, **_UNMULTIPLIED}),
    "nemotron_h": Family("nemotron_h", state_spaces.nemotron_h, _NEMOTRON_H, "layer_norm_epsilon", mixed=True),
    "nemotron_h_moe": Family("nemotron_h", state_spaces.nemotron_h, _NEMOTRON_H, "layer_norm_epsilon", mixed=True),
    "apertus": Family("apertus", _attention_bias, {"hidden_act": "xielu"}),
    "olmo2": Family("olmo2", _olmo2),
    "smollm3": Family("smollm3", _smollm3, {"use_sliding_window": False}),
    "glm4": Family("glm4", _attention_bias),
    "mistral3": Family("ministral3", _mistral3, {"sliding_window": None}),
    "deepseek2": Family("deepseek_v3", latent),
    "lfm2": Family(
        "lfm2", convolutions, {"conv_bias": False, "block_auto_adjust_ff_dim": False}, "norm_eps", mixed=True
    ),
    "lfm2moe": Family("lfm2_moe", _lfm2moe, _UNBIASED, "norm_eps", mixed=True),
    "qwen3next": Family("qwen3_next", _qwen3next, {"norm_topk_prob": True} | _EVERY),
    "qwen35": Family("qwen3_5_text", deltas),
    "qwen35moe": Family("qwen3_5_moe_text", _qwen3next),
    "glm4moe": Family("glm4_moe", _glm4moe),
    "dots1": Family("dots1", _dots1, {"sliding_window": None}),
    "minimax-m2": Family("minimax_m2", _minimax),
    "exaone4": Family("exaone4", _exaone4),
    "seed_oss": Family("seed_oss", _attention_bias),
    "ernie4_5": Family("ernie4_5", lambda keys, config: biases(keys, use_bias="attn_q")),
    "hunyuan-dense": Family("hunyuan_v1_dense", _attention_bias),
    "hunyuan-moe": Family("hunyuan_v1_moe", _hunyuan_moe),
    "ernie4_5-moe": Family("ernie4_5_moe", _ernie_moe),
    "exaone-moe": Family("exaone_moe", _exaone_moe),
    "llama4": Family(
        "llama4_text",
        _llama4,
        {"attention_chunk_size": _CHUNK, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
    ),
    "arcee": Family("arcee", None, {"hidden_act": "relu2"}),
    "cohere2": Family("cohere2", _cohere2, {}, "layer_norm_eps", False),
    "starcoder2": Family("starcoder2", None, _TANH | {"sliding_window": None}, "norm_epsilon", False),
    "stablelm": Family("stablelm", _stablelm, {}, "layer_norm_eps", False),
    "phi2": Family("phi", None, {"hidden_act": "gelu_new", "qk_layernorm": False}, "layer_norm_eps", False),
    "gpt2": Family("gpt2", _gpt2, {"activation_function": "gelu_new"}, "layer_norm_epsilon", False),
    "gptneox": Family("gpt_neox", _gpt_neox, {}, "layer_norm_eps", False),
    "falcon": Family("falcon", _falcon, {}, "layer_norm_epsilon", False, sized=False),
    "nemotron": Family("nemotron", _nemotron, {"hidden_act": "relu2"}, "norm_eps", False),
    "olmoe": Family("olmoe", _olmoe, {"norm_topk_prob": False, "clip_qkv": None}),
}
