"""What llama.cpp's architectures with state spaces (Mamba-2) say in keys, as config.json has it."""

from runtime.checkpoints.gguf.keys import Keys
from runtime.checkpoints.gguf.reader import damaged
from runtime.checkpoints.gguf.shared_keys import Config, biases, experts, multipliers, sigmoids

LEAST_STEP = "ssm.time_step_min"
"""Ours: the least step of a state space. llama.cpp has none."""


def _sizes(keys: Keys) -> tuple[int, int, int, int, int]:
    """Heads, their dimensions, groups, dimensions of a state, taps. Raises UserError for heads of different sizes."""
    heads, inner = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    if inner % heads:
        raise damaged(keys.shown, f"{keys.architecture}.ssm.inner_size {inner} is no multiple of {heads} heads")
    groups, state, taps = (keys.whole(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    return heads, inner // heads, groups, state, taps


def _mixed(keys: Keys) -> Config:
    """A state space's sizes by the names that families with attention besides have for them."""
    heads, dim, groups, state, taps = _sizes(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": taps,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def mamba2(keys: Keys, config: Config) -> Config:
    """State spaces alone."""
    heads, dim, groups, state, taps = _sizes(keys)
    expand, rest = divmod(heads * dim, config["hidden_size"])
    if rest:
        raise damaged(keys.shown, f"ssm.inner_size {heads * dim} is no multiple of embedding_length")
    return {
        "num_heads": heads,
        "head_dim": dim,
        "n_groups": groups,
        "state_size": state,
        "conv_kernel": taps,
        "expand": expand,
    }


def granitehybrid(keys: Keys, config: Config) -> Config:
    """Granite's multipliers; layers without key heads have a state space. Raises UserError for another expansion."""
    layers, inner = config["num_hidden_layers"], keys.whole("ssm.inner_size")
    if inner != 2 * config["hidden_size"]:
        what = f"ssm.inner_size must be twice embedding_length, as llama.cpp has it for granitehybrid, found {inner}"
        raise damaged(keys.shown, what)
    kv_heads = keys.each("attention.head_count_kv", layers) or [config["num_key_value_heads"]] * layers
    mixture: Config = {"num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}
    if keys.get("expert_count"):
        shared = keys.whole("expert_shared_feed_forward_length")
        mixture = experts(keys, "num_local_experts") | {"shared_intermediate_size": shared}
    return (
        multipliers(keys, config)
        | mixture
        | _mixed(keys)
        | {
            "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
            "mamba_expand": 2,
            "position_embedding_type": "rope" if keys.truth("rope.scaling.finetuned", True) else "nope",
        }
    )


def falcon_h1(keys: Keys, config: Config) -> Config:
    """Attention and a state space side by side; multipliers are in the weights."""
    return (
        _mixed(keys)
        | biases(keys, attention_bias="attn_q", mlp_bias="ffn_up")
        | {"mamba_d_ssm": keys.whole("ssm.inner_size"), "mamba_rms_norm": keys.has(".ssm_norm.weight")}
    )


def nemotron_h(keys: Keys, config: Config) -> Config:
    """Blocks of one part each: where there is neither a key head nor a feed forward length it is a state space."""
    layers = config["num_hidden_layers"]
    kv_heads = keys.each("attention.head_count_kv", layers) or [config["num_key_value_heads"]] * layers
    lengths = keys.each("feed_forward_length", layers) or [config["intermediate_size"]] * layers
    mixed = bool(keys.get("expert_count"))
    after = "moe" if mixed else "mlp"
    kinds = [
        after if length else "full_attention" if count else "linear_attention"
        for count, length in zip(kv_heads, lengths, strict=True)
    ]
    heads, dim, groups, state, taps = _sizes(keys)
    found = {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": taps,
        "time_step_min": keys.real(LEAST_STEP, 0.0),
    } | biases(keys, mlp_bias="ffn_up", attention_bias="attn_q")
    if mixed:
        found |= sigmoids(keys, config)
        found["moe_shared_expert_intermediate_size"] = keys.whole("expert_shared_feed_forward_length")
    return found
