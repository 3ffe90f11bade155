"""What several of llama.cpp's architectures say in the same keys, or say at length, as config.json has it."""

from typing import Any

from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.reader import damaged

Config = dict[str, Any]
# Each expert gets names of its own, so a count out of a damaged file must be a sane one.
_MOST_EXPERTS = 1 << 14
# Of expert_gating_func.
_SIGMOID = 2


def experts(keys: Keys, name: str = "num_experts") -> Config:
    """The number of experts, under `name`, and of those that a token goes through. Raises UserError for odd ones."""
    count, used = keys.whole("expert_count"), keys.whole("expert_used_count")
    if not used <= count <= _MOST_EXPERTS:
        what = f"{keys.architecture}.expert_used_count {used} and expert_count {count} must rise, to at most"
        raise damaged(keys.shown, f"{what} {_MOST_EXPERTS}")
    return {name: count, "num_experts_per_tok": used}


def biases(keys: Keys, **tensors: str) -> Config:
    """Which layers have biases: transformers' keys, and llama.cpp's names of layers."""
    return {key: keys.has(f".{tensor}.bias") for key, tensor in tensors.items()}


def multipliers(keys: Keys, config: Config) -> Config:
    """Granite's."""
    # 0 is none of it.
    attention = keys.real("attention.scale", 0.0) or config["head_dim"] ** -0.5
    return {
        "embedding_multiplier": keys.real("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": attention,
        "residual_multiplier": keys.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale"),
    }


def window(keys: Keys, config: Config, every: int, default: int | None = None) -> Config:
    """Window and layer_types: of so many layers the last sees everything, where the file has no pattern of its own."""
    layers, key = config["num_hidden_layers"], "attention.sliding_window_pattern"
    slides = keys.each(key, layers)
    if slides is None:
        every = keys.whole(key, every)
        slides = [int(layer % every < every - 1) for layer in range(layers)]
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    return {"sliding_window": keys.whole("attention.sliding_window", default), "layer_types": kinds}


def deltas(keys: Keys, config: Config) -> Config:
    """Layers with a gated delta rule, and those with attention."""
    layers, heads = config["num_hidden_layers"], keys.whole("ssm.time_step_rank")
    every = keys.whole("full_attention_interval", 4)
    slow = keys.each("attention.recurrent_layers", layers) or [(layer + 1) % every for layer in range(layers)]
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in slow],
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        # Values have as many dimensions as keys.
        "linear_value_head_dim": keys.whole("ssm.state_size"),
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
    }


def convolutions(keys: Keys, config: Config) -> Config:
    """LFM2's layers with a short convolution, and those with attention."""
    layers = config["num_hidden_layers"]
    heads = keys.each("attention.head_count_kv", layers) or [config["num_key_value_heads"]] * layers
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "block_ff_dim": config["intermediate_size"],
        "tie_embedding": config["tie_word_embeddings"],
    }


def _mixture(keys: Keys) -> Config:
    """Experts as DeepSeek has them: in groups, with some that are everyone's; the first layers have none."""
    return experts(keys, "n_routed_experts") | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count"),
        "first_k_dense_replace": int(keys.real("leading_dense_block_count", 0)),
        "norm_topk_prob": keys.truth("expert_weights_norm", False),
        "routed_scaling_factor": keys.real("expert_weights_scale", 0.0) or 1.0,
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
    }


def sigmoids(keys: Keys, config: Config) -> Config:
    """The same, chosen by sigmoids. Raises UserError where they are not."""
    if (found := keys.whole("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise damaged(keys.shown, f"expert_gating_func must be {_SIGMOID} for {keys.architecture}, found {found}")
    return _mixture(keys)


def latent(keys: Keys, config: Config) -> Config:
    """DeepSeek's attention and experts. Raises UserError for files from before their keys' layer was two tensors."""
    rank, rotated = keys.whole("attention.kv_lora_rank"), keys.whole("rope.dimension_count")
    if not keys.has(".attn_k_b.weight"):
        raise damaged(
            keys.shown, "tensor blk.0.attn_k_b.weight is missing, which files had before May 2025 as attn_kv_b"
        )
    # DeepSeek-V2-Lite and those built like it.
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    lite = layers in (26, 27) or (layers == 48 and vocab == 128_256)
    # GLM-4.7-Flash's files may not say it.
    glm = layers in (47, 48) and vocab == 154_880
    sigmoid = keys.whole("expert_gating_func", _SIGMOID if glm else 1) == _SIGMOID
    own = _mixture(keys) | {"model_type": "deepseek_v3"}
    if not sigmoid:
        method = "greedy" if own["n_group"] == 1 else "group_limited_greedy"
        own |= {"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": method}
    return own | {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "q_lora_rank": None if lite else keys.whole("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla") - rotated,
        "v_head_dim": keys.whole("attention.value_length_mla"),
        "rope_parameters": {k: v for k, v in config["rope_parameters"].items() if k != "partial_rotary_factor"},
    }
