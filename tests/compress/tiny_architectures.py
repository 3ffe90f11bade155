"""Tiny random models of any causal language model that transformers builds, with the shipped pair's tokenizer."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

PAIR = Path(__file__).parents[2] / "examples" / "pair" / "target"
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
    ),
    128: (
        *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "dim_ff", "ffn_hidden_size", "mamba_d_ssm"),
        *("decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    512: ("max_position_embeddings", "n_positions"),
    4096: ("vocab_size", "vocab_size_per_layer_input"),
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
_ATTENTION = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# What some architectures want besides; the first with which one can be built and run is taken.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    _ATTENTION,
    _ATTENTION | {"num_key_value_heads": 4},
    {"num_hidden_layers": 3, "layer_types": ["recurrent", "recurrent", "attention"]},
    {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    {"attn_layer_indices": [1]},
    {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    {"attention_types": [[["global", "local"], 1]]},
    {"num_experts_per_tok": 1},
    {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
)


def make(model_type: str, out: Path) -> bool:
    """Writes a random bfloat16 model of a `model_type`; False where none of a small size can be built and run."""
    from transformers import AutoModelForCausalLM

    for config in _configurations(model_type):
        try:
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                continue
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            with torch.inference_mode():
                model(input_ids=torch.tensor([[5, 9, 17]]))
        except Exception:
            continue
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(out)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PAIR / name, out)
        return True
    return False


def _configurations(model_type: str) -> Iterator[Any]:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    for variant in _VARIANTS:
        try:
            config = kind(**_shrunk(kind().to_dict()) | variant)
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
        except Exception:
            continue
        yield config


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
