"""What each of llama.cpp's architectures says in keys of its own, and what it computes without saying, as config.json
has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.checkpoints.gguf import gemma, mixtures, state_spaces
from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.rope import ORIGINAL_CONTEXT
from runtime.checkpoints.gguf.shared_keys import (
    Config,
    biases,
    convolutions,
    deltas,
    experts,
    latent,
    multipliers,
    window,
)


@dataclass(frozen=True)
class Family:
    """transformers' configuration of an architecture: what llama.cpp has no key for is `fixed`, the rest says `more`.

    eps    transformers' key of the norms' epsilon; `rms` norms by the root mean square have another key there.
    mixed  layers without attention have no key heads, and those without an MLP no channels; or layers have different
           numbers of them, of which config.json's common ones are the first layer's.
    attends  it has attention.
    sized  config.json has the size of a head.
    """

    model_type: str
    more: Callable[[Keys, Config], Config] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    rms: bool = True
    mixed: Literal["", "missing", "different"] = ""
    sized: bool = True
    attends: bool = True


def _llama(keys: Keys, config: Config) -> Config:
    if keys.get("expert_count") is not None:
        return {"model_type": "mixtral", "sliding_window": None} | experts(keys, "num_local_experts")
    return biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")


def _phi3(keys: Keys, config: Config) -> Config:
    window = "attention.sliding_window"
    found: Config = {"sliding_window": None if keys.get(window) is None else keys.whole(window)}
    if (original := config["rope_parameters"].get(ORIGINAL_CONTEXT)) is not None:
        found[ORIGINAL_CONTEXT] = original
    return found


def _granite(keys: Keys, config: Config) -> Config:
    return multipliers(keys, config) | biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")


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


# llama.cpp slides in models of so many layers, and in no others.
_EXAONE_32B = 64


def _exaone4(keys: Keys, config: Config) -> Config:
    if config["num_hidden_layers"] != _EXAONE_32B:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return window(keys, config, 4, 4096)


# llama.cpp norms queries and keys in models of so many layers or more, and in no others.
_COMMAND_R_PLUS = 64


def _cohere(keys: Keys, config: Config) -> Config:
    return {
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": config["num_hidden_layers"] >= _COMMAND_R_PLUS,
    }


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


def _starcoder(keys: Keys, config: Config) -> Config:
    return _gpt2(keys, config) | {"multi_query": config["num_key_value_heads"] == 1}


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
    "qwen3moe": Family("qwen3_moe", mixtures.qwen3moe, {"norm_topk_prob": True} | _EVERY),
    "phi3": Family("phi3", _phi3),
    "gemma": Family("gemma", None, _TANH),
    "gemma2": Family("gemma2", gemma.gemma2, _TANH),
    "gemma3": Family("gemma3_text", gemma.gemma3, _TANH),
    "gemma4": Family("gemma4_text", gemma.gemma4, _TANH, mixed="different"),
    "qwen2moe": Family("qwen2_moe", mixtures.qwen2moe, {"norm_topk_prob": False} | _EVERY),
    "gpt-oss": Family("gpt_oss", mixtures.gpt_oss, {"swiglu_limit": 7.0, "attention_bias": True}),
    "granite": Family("granite", _granite),
    "granitemoe": Family("granitemoe", mixtures.granitemoe),
    "granitehybrid": Family("granitemoehybrid", state_spaces.granitehybrid, mixed="missing"),
    "mamba2": Family("mamba2", state_spaces.mamba2, {"use_bias": False}, "layer_norm_epsilon", attends=False),
    "falcon-h1": Family("falcon_h1", state_spaces.falcon_h1, {"mamba_norm_before_gate": False, **_UNMULTIPLIED}),
    "nemotron_h": Family("nemotron_h", state_spaces.nemotron_h, _NEMOTRON_H, "layer_norm_epsilon", mixed="missing"),
    "nemotron_h_moe": Family("nemotron_h", state_spaces.nemotron_h, _NEMOTRON_H, "layer_norm_epsilon", mixed="missing"),
    "apertus": Family("apertus", _attention_bias, {"hidden_act": "xielu"}),
    "olmo2": Family("olmo2", _olmo2),
    "smollm3": Family("smollm3", _smollm3, {"use_sliding_window": False}),
    "chatglm": Family("glm", _attention_bias),
    "glm4": Family("glm4", _attention_bias),
    "mistral3": Family("ministral3", _mistral3, {"sliding_window": None}),
    "deepseek2": Family("deepseek_v3", latent),
    "lfm2": Family(
        "lfm2", convolutions, {"conv_bias": False, "block_auto_adjust_ff_dim": False}, "norm_eps", mixed="missing"
    ),
    "lfm2moe": Family("lfm2_moe", mixtures.lfm2moe, _UNBIASED, "norm_eps", mixed="missing"),
    "qwen3next": Family("qwen3_next", mixtures.qwen3next, {"norm_topk_prob": True} | _EVERY),
    "qwen35": Family("qwen3_5_text", deltas),
    "qwen35moe": Family("qwen3_5_moe_text", mixtures.qwen3next),
    "glm4moe": Family("glm4_moe", mixtures.glm4moe),
    "dots1": Family("dots1", mixtures.dots1, {"sliding_window": None}),
    "minimax-m2": Family("minimax_m2", mixtures.minimax),
    "exaone4": Family("exaone4", _exaone4),
    "seed_oss": Family("seed_oss", _attention_bias),
    "ernie4_5": Family("ernie4_5", lambda keys, config: biases(keys, use_bias="attn_q")),
    "hunyuan-dense": Family("hunyuan_v1_dense", _attention_bias),
    "hunyuan-moe": Family("hunyuan_v1_moe", mixtures.hunyuan_moe),
    "ernie4_5-moe": Family("ernie4_5_moe", mixtures.ernie_moe),
    "exaone-moe": Family("exaone_moe", mixtures.exaone_moe),
    "llama4": Family("llama4_text", mixtures.llama4),
    "arcee": Family("arcee", None, {"hidden_act": "relu2"}),
    "command-r": Family("cohere", _cohere, {}, "layer_norm_eps", False),
    "cohere2": Family("cohere2", _cohere2, {}, "layer_norm_eps", False),
    "starcoder": Family(
        "gpt_bigcode", _starcoder, {"activation_function": "gelu_pytorch_tanh"}, "layer_norm_epsilon", False
    ),
    "starcoder2": Family("starcoder2", None, _TANH | {"sliding_window": None}, "norm_epsilon", False),
    "stablelm": Family("stablelm", _stablelm, {}, "layer_norm_eps", False),
    "phi2": Family("phi", None, {"hidden_act": "gelu_new", "qk_layernorm": False}, "layer_norm_eps", False),
    "gpt2": Family("gpt2", _gpt2, {"activation_function": "gelu_new"}, "layer_norm_epsilon", False),
    "gptneox": Family("gpt_neox", _gpt_neox, {}, "layer_norm_eps", False),
    "falcon": Family("falcon", _falcon, {}, "layer_norm_epsilon", False, sized=False),
    "nemotron": Family("nemotron", _nemotron, {"hidden_act": "relu2"}, "norm_eps", False),
    "olmoe": Family("olmoe", mixtures.olmoe, {"norm_topk_prob": False, "clip_qkv": None}),
}
