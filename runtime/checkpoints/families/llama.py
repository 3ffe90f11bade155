"""Llama and the families that differ from it in a number or two."""

from runtime.checkpoints.families.common import Config, activation, count, llama, windows
from runtime.checkpoints.record import Architecture, Experts, Names
from runtime.errors import UserError

# The first families: activations other than these run in the adapter.
_ACTIVATIONS = ("silu", "gelu_tanh")


def first(config: Config) -> Architecture | None:
    """Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, Mixtral and Qwen3-MoE."""
    kind, layers = config["model_type"], count(config, "num_hidden_layers")
    gemma = kind == "gemma"
    said = config.get("hidden_act")
    if gemma and (said := config.get("hidden_activation") or said) in (None, "gelu"):
        said = "gelu_pytorch_tanh"  # Gemma's first configs mean the tanh form by "gelu"
    act = activation({"hidden_act": said})
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step) if kind == "qwen3_moe" else ()
    # Sizes are checked before what depends on them.
    found = llama(config, act if act in _ACTIVATIONS else None)
    if found is None:
        return None
    return llama(
        config,
        act,
        tied=bool(config.get("tie_word_embeddings", gemma)),
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=found.hidden**0.5 if gemma else 1.0,
        query_key_norm=kind in ("qwen3", "qwen3_moe"),
        fused=kind == "phi3",
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)) if kind == "phi3" else Names(),
        windows=_windows(config, layers),
        experts=_experts(config, kind),
        dense_layers=dense,
    )


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    qwen = config["model_type"].startswith("qwen")
    if qwen and not config.get("use_sliding_window"):
        return (None,) * layers
    found = windows(config)
    first = config.get("max_window_layers", 0) if qwen and not config.get("layer_types") else 0
    return tuple(window if i >= first else None for i, window in enumerate(found))


def _experts(config: Config, kind: str) -> Experts | None:
    if kind not in ("mixtral", "qwen3_moe"):
        return None
    # qwen3_moe's is written under the one name by older releases of transformers, under the other by newer ones.
    local = kind == "mixtral" or "num_local_experts" in config
    number = count(config, "num_local_experts" if local else "num_experts")
    hidden = count(config, "intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
    if (per_token := count(config, "num_experts_per_tok")) > number:
        raise UserError(f"config.json: num_experts_per_tok is {per_token}, and a layer has {number} experts")
    renormalize = kind == "mixtral" or bool(config.get("norm_topk_prob", False))
    return Experts(number, per_token, hidden, renormalize)
