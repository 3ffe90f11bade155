"""What llama.cpp's architectures of Gemma say in keys of their own, as config.json has it."""

from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.reader import damaged
from runtime.checkpoints.gguf.shared_keys import Config, experts, window

_SLIDING = "sliding_attention"


def _scalar(config: Config, layers: int) -> int:
    """What Gemma's scores are divided by the root of: in models of so many layers it is not a head's size."""
    if config["num_hidden_layers"] == layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def gemma2(keys: Keys, config: Config) -> Config:
    """Gemma 2."""
    return window(keys, config, 2, 4096) | {
        "query_pre_attn_scalar": _scalar(config, 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def gemma3(keys: Keys, config: Config) -> Config:
    """Gemma 3; without windows all layers see everything."""
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    windowed = keys.get("attention.sliding_window") is not None
    kinds = window(keys, config, 6) if windowed else {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return kinds | {
        "query_pre_attn_scalar": _scalar(config, 62),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]},
    }


def gemma4(keys: Keys, config: Config) -> Config:
    """Gemma 4: keys of two shapes. Raises UserError where the last layers do not read those of the two before them."""
    layers, shared = config["num_hidden_layers"], int(keys.real("attention.shared_kv_layers", 0))
    slides = window(keys, config, 6)
    kinds, own = slides["layer_types"], layers - shared
    full = [layer for layer in range(layers) if kinds[layer] == "full_attention"]
    # llama.cpp reads the last layer's keys, or, in those that slide, the last but one's, whatever that is.
    if kinds[-1] != "full_attention" or own < 2 or (shared and kinds[own - 2 : own] != [_SLIDING, "full_attention"]):
        what = (
            f"attention.shared_kv_layers {shared} must leave a layer that slides and one that does not, as the last two"
        )
        raise damaged(keys.shown, f"{what}, and the last layer of all must not slide")
    heads = keys.each("attention.head_count_kv", layers) or [config["num_key_value_heads"]] * layers
    of_windows = keys.whole("attention.key_length_swa")
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    rotated = keys.whole("rope.dimension_count_swa", of_windows)
    if rotated != of_windows:
        local["partial_rotary_factor"] = rotated / of_windows
    sparse = bool(keys.get("expert_count"))
    mixture = experts(keys) if sparse else {}
    if sparse:
        mixture["top_k_experts"] = mixture.pop("num_experts_per_tok")
        mixture["moe_intermediate_size"] = keys.whole("expert_feed_forward_length")
    lengths = keys.each("feed_forward_length", layers)
    return (
        slides
        | mixture
        | {
            "head_dim": of_windows,
            "global_head_dim": config["head_dim"],
            "num_key_value_heads": next((heads[n] for n in range(layers) if n not in full), heads[0]),
            "num_global_key_value_heads": heads[full[0]],
            "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in keys.header.tensors,
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": lengths is not None and lengths[-1] == 2 * lengths[0],
            "hidden_size_per_layer_input": int(keys.real("embedding_length_per_layer_input", 0)),
            "vocab_size_per_layer_input": config["vocab_size"],
            "enable_moe_block": sparse,
            "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
            "rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]},
        }
    )
