"""What llama.cpp's architectures with experts say in keys of their own, as config.json has it."""

from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.reader import damaged
from runtime.checkpoints.gguf.shared_keys import (
    Config,
    biases,
    convolutions,
    deltas,
    experts,
    multipliers,
    sigmoids,
    window,
)

# What llama.cpp has of Llama 4 as constants: tokens of a chunk, layers of which the last does not rotate, the number of
# experts beside which queries and keys are not normed, and by what queries grow.
_CHUNK, _EVERY_ROTATES, _UNNORMED, _FLOOR, _GROWTH = 8192, 4, 128, 8192, 0.1


def qwen3moe(keys: Keys, config: Config) -> Config:
    """Qwen3-MoE."""
    return experts(keys) | {"moe_intermediate_size": keys.whole("expert_feed_forward_length")}


def qwen2moe(keys: Keys, config: Config) -> Config:
    """Qwen2-MoE, with an expert that is everyone's."""
    return qwen3moe(keys, config) | {
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def gpt_oss(keys: Keys, config: Config) -> Config:
    """gpt-oss."""
    size = {"intermediate_size": keys.whole("expert_feed_forward_length")}
    return window(keys, config, 2) | experts(keys, "num_local_experts") | size


def granitemoe(keys: Keys, config: Config) -> Config:
    """Granite's multipliers and experts; in some an MLP that every token goes through."""
    found = multipliers(keys, config) | biases(keys, attention_bias="attn_q") | experts(keys, "num_local_experts")
    key = "expert_shared_feed_forward_length"
    if not keys.get(key):
        return found
    return found | {"model_type": "granitemoeshared", "shared_intermediate_size": keys.whole(key)}


def lfm2moe(keys: Keys, config: Config) -> Config:
    """LFM2-MoE."""
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


def qwen3next(keys: Keys, config: Config) -> Config:
    """Qwen3-Next: Qwen2-MoE's experts and delta rules."""
    return deltas(keys, config) | qwen2moe(keys, config)


def glm4moe(keys: Keys, config: Config) -> Config:
    """GLM-4.5, and Solar Open, whose heads rotate as a whole."""
    normed = {"use_qk_norm": keys.has(".attn_q_norm.weight")}
    found = sigmoids(keys, config) | normed | biases(keys, attention_bias="attn_q")
    if keys.whole("rope.dimension_count") < config["head_dim"]:
        return found
    return found | {"model_type": "solar_open"}


def dots1(keys: Keys, config: Config) -> Config:
    """dots.llm1."""
    # Each head has keys of its own.
    return sigmoids(keys, config) | {"num_key_value_heads": config["num_attention_heads"]}


def exaone_moe(keys: Keys, config: Config) -> Config:
    """K-EXAONE: the first layers are dense."""
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


def ernie_moe(keys: Keys, config: Config) -> Config:
    """Ernie 4.5 with experts: the first layers are dense."""
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


def hunyuan_moe(keys: Keys, config: Config) -> Config:
    """HunYuan with experts."""
    found = experts(keys)
    return found | {"moe_topk": found.pop("num_experts_per_tok")} | biases(keys, attention_bias="attn_q")


def minimax(keys: Keys, config: Config) -> Config:
    """MiniMax-M2."""
    # Feed forward of a layer is that of its experts.
    return experts(keys, "num_local_experts") | {"intermediate_size": keys.whole("expert_feed_forward_length")}


def olmoe(keys: Keys, config: Config) -> Config:
    """OLMoE."""
    # Each head has keys of its own.
    return experts(keys) | {"num_key_value_heads": config["num_attention_heads"]}


def llama4(keys: Keys, config: Config) -> Config:
    """Llama 4. Raises UserError for files without chunks."""
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
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _FLOOR,
        "attn_scale": _GROWTH,
        "use_qk_norm": count["num_local_experts"] != _UNNORMED,
    }
