"""Tiny random models of any causal language model that transformers builds.

Configurations are shrunk by the names of their sizes; what some architectures want besides stands in two tables.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from runtime.errors import UserError
from runtime.model.hf_classes import auto_class

LARGEST = 30_000_000
# What configurations call their sizes, each with a small one.
_SIZES: dict[int, tuple[str, ...]] = {
    0: ("pad_token_id",),
    1: ("bos_token_id", "n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups"),
    2: (
        *("eos_token_id", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
        *(
            "num_key_value_heads",
            "num_experts_per_tok",
            "num_experts_per_token",
            "linear_num_key_heads",
            "altup_num_inputs",
            "num_blocks",
        ),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "num_experts"),
        *("encoder_attention_heads", "num_local_experts", "n_routed_experts", "num_head", "linear_num_value_heads"),
        *("num_routed_experts", "time_step_rank", "linear_num_heads"),
    ),
    8: ("rotary_dim", "mamba_n_heads", "mamba_num_heads", "laurel_rank"),
    16: (
        *("head_dim", "dim_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_d_state", "state_size"),
        *(
            "ssm_state_size",
            "mamba_head_dim",
            "linear_key_head_dim",
            "linear_head_dim",
            "linear_value_head_dim",
            "kv_channels",
        ),
        *("hidden_size_per_layer_input",),
    ),
    32: ("q_lora_rank", "kv_lora_rank"),
    64: (
        *("hidden_size", "n_embd", "d_model", "n_embed", "dim", "word_embed_proj_dim", "embedding_size", "dim_model"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "lru_width", "attention_hidden_size"),
        *("attention_window_size", "sliding_window", "dim_model_base"),
        # Of towers.
        *("out_hidden_size", "projection_dim", "vision_output_dim", "projector_input_dim", "projector_output_dim"),
    ),
    128: (
        *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "dim_ff", "ffn_hidden_size", "mamba_d_ssm"),
        *("decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    512: ("max_position_embeddings", "n_positions"),
    4096: ("vocab_size", "vocab_size_per_layer_input"),
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
_LAYERS = {"num_hidden_layers": 2}
_LINEAR = _LAYERS | {"layer_types": ["linear_attention", "full_attention"]}
_INDEXED = _LINEAR | {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 16, "indexer_compress_ratio": 2},
}
_WIDE = {"attention_hidden_size": 128, "attention_head_dim": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
# What some architectures want besides; the first with which one can be built and run is taken.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    _LINEAR,
    _LINEAR | {"num_key_value_heads": 4},
    {"num_hidden_layers": 3, "layer_types": ["recurrent", "recurrent", "attention"]},
    _LAYERS | {"layer_types": ["mamba", "attention"]},
    _LAYERS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    {"attn_layer_indices": [1]},
    {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    {"attention_types": [[["global", "local"], 1]]},
    {"num_experts_per_tok": 1},
    {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    {"head_dim": 16},
    {"text_config": _LINEAR},
)
# What one architecture alone wants.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR | {"num_key_value_heads": 4, "n_group": 2},
    "blt": {
        **{"use_cache": False, "encoder_hash_byte_group_vocab": 512},
        "patcher_config": {"vocab_size": 4096},
        "encoder_config": {"vocab_size": 4096, "hidden_size_global": 64},
        "decoder_config": {"vocab_size": 4096, "hidden_size_global": 64},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [4, 2, 2]}}},
    "cpmant": {"init_std": 0.02},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 128},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "longcat_flash": {"num_key_value_heads": 4, "expert_ffn_hidden_size": 64, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"head_dim": 32},
    "lfm3_vl": {"text_config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}},
    "qwen2_vl": {"text_config": _SECTIONS, "vision_config": {"embed_dim": 64, "num_heads": 4, "depth": 2}},
    "qwen2_5_vl": {"text_config": _SECTIONS},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "xlm": {"emb_dim": 64},
    "youtu": {"num_key_value_heads": 4, "initializer_range": 0.02},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": _WIDE | {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": _WIDE | {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16},
}


def tiny_model(model_type: str, name: str | None = None) -> Any:
    """A random model of a `model_type` in eval mode, of a few thousand to a few million weights.

    name  the class, where it is not to be the language model alone.

    One that does not run on tokens alone is given where none does. Raises UserError, with what the first try met,
    where none can be built.
    """
    from transformers import CONFIG_MAPPING

    kind, first, built = CONFIG_MAPPING[model_type], "", None
    variants = (_OWN[model_type],) if model_type in _OWN else _VARIANTS
    for variant, dtype in product(variants, (torch.bfloat16, torch.float32)):
        try:
            given = kind().to_dict()
            if "text_config" in variant and "text_config" not in given:
                continue
            config = kind(**_merge(_shrunk(given), variant))
            config.architectures = name and [name]
            model = _build(config, dtype)
        except Exception as error:  # somebody else's classes raise whatever their layers do
            first = first or f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            continue
        built = model if built is None else built
        try:
            with torch.inference_mode():
                model(input_ids=torch.tensor([[5, 9, 17]]))
        except Exception:  # told by who runs it (hf_probe.py)
            continue
        return model
    if built is None:
        raise UserError(f"no small model of it can be built here: {first}")
    return built


def _build(config: Any, dtype: torch.dtype) -> Any:
    auto = auto_class(config)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} weights")
    model = auto.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _merge(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `others` in their place, in nested configurations, too."""
    nested = {k: _merge(values.get(k, {}), v) if k.endswith("_config") else v for k, v in others.items()}
    return {**values, **nested}


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes among a configuration's values, small; of what it nests, too."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if name in _SMALL and (is_size or name.endswith("token_id")):
            out[name] = _SMALL[name]
        elif name.endswith("_config") and isinstance(value, dict):
            out[name] = _shrunk(value) | {k: value[k] for k in ("model_type",) if k in value}
    return out
