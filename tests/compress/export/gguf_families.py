"""The families of tests/runtime/model/families.py that GGUF can hold: what of each has to be otherwise for that."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.runtime.model import families

_DIVIDED: dict[str, Any] = {"hidden_size": 200, "head_dim": 40}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
_LLAMA_3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_TOGETHER = {"mscale": 1.3, "mscale_all_dim": 1.3}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 72},
    "gemma3_text": {"query_pre_attn_scalar": 40},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "olmo2": {},
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": _YARN,
        }
    },
    "granite": {},
    "granitemoehybrid": {"mamba_proj_bias": False},
    "mamba2": {"use_bias": False, "time_step_limit": [0.0, float("inf")]},
    "falcon_h1": {"mamba_proj_bias": False, "projectors_bias": False, "attention_bias": False}
    | {"mamba_norm_before_gate": False},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        **{"use_bias": False, "mlp_bias": False, "time_step_min": 1e-9},
    },
    "apertus": {},
    "glm": {**_DIVIDED},
    "glm4": {},
    "ministral": {"layer_types": ["full_attention"] * 2},
    "ministral3": {},
    "cwm": {"layer_types": ["full_attention"] * 2, "rope_parameters": _LLAMA_3},
    "seed_oss": {"attention_out_bias": False},
    "arcee": {},
    "iquestcoder": {},
    "exaone4": {**_DIVIDED, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "exaone_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "llama4_text": {
        "rope_parameters": _LLAMA_3 | {"high_freq_factor": 1.0},
        **{
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [1, 3],
            "interleave_moe_layer_step": 2,
        },
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    },
    "gpt_bigcode": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "phi": {},
    "cohere": {"use_qk_norm": False},
    "cohere2": {"tie_word_embeddings": True},
    "nemotron": {**_DIVIDED},
    "gpt2": {},
    "gpt_neox": {},
    "falcon": {},
    "olmoe": {"num_key_value_heads": 5},
    "qwen2_moe": {"mlp_only_layers": []},
    "granitemoe": {},
    "granitemoeshared": {},
    "deepseek_v2": {"num_hidden_layers": 26, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {"attention_bias": False, "rope_parameters": {**_YARN, **_TOGETHER}},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": {"swiglu_limit": 7.0, "head_dim": 40},
    "qwen3_next": {"mlp_only_layers": [], "linear_value_head_dim": 20},
    "qwen3_5_text": {"linear_value_head_dim": 20},
    "qwen3_5_moe_text": {"linear_value_head_dim": 20},
    "glm4_moe": {},
    "solar_open": {},
    "dots1": {"num_key_value_heads": 5, "sliding_window": None, "layer_types": None},
    "minimax_m2": {},
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
}


# Other forms of these families, which llama.cpp has under another name or without some of their parts.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h without experts": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True},
    ),
    "cohere with norms of queries": ("cohere", {"use_qk_norm": True, "num_hidden_layers": 64}),
    "gpt_bigcode with key heads for each": ("gpt_bigcode", {"multi_query": False}),
    "granitemoehybrid without experts": ("granitemoehybrid", {"num_local_experts": 0}),
    "granitemoehybrid of attention alone": (
        "granitemoehybrid",
        {
            **{"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
            **{"hidden_size": 200, "intermediate_size": 36},
        },
    ),
    "phi with one table, and a bias of the head": ("phi", {"tie_word_embeddings": True}),
    "olmo2 with dynamic frequencies": (
        "olmo2",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}},
    ),
    "exaone_moe that chooses all groups": ("exaone_moe", {"n_group": 4, "topk_group": 4}),
    "falcon_h1 with one table": ("falcon_h1", {"tie_word_embeddings": True, "mamba_rms_norm": False}),
    "gemma4_text without experts": (
        "gemma4_text",
        {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        | {"attention_k_eq_v": False},
    ),
}

# llama.cpp takes their heads to be together as wide as the hidden size, and transformers has a size of heads for them.
SQUARE = (
    *("olmo2", "olmo3", "glm", "exaone4", "starcoder2", "stablelm", "phi", "cohere", "cohere2", "nemotron", "olmoe"),
    *("qwen2_moe", "lfm2", "lfm2_moe"),
)


def write(kind: str, path: Path, **changes: Any) -> Path:
    """The family's tiny random model, its tokenizer splitting text like GPT-2's."""
    known = families.FAMILIES[kind]
    families.FAMILIES[kind] = known | CHANGES.get(kind, {}) | changes
    try:
        families.write(kind, path)
    finally:
        families.FAMILIES[kind] = known
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


# Sizes that whole blocks of 32 divide, for layers that stay packed.
EVEN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 320},
    "gpt_neox": {"hidden_size": 320, "intermediate_size": 96},
    "falcon": {"hidden_size": 320, "ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 5},
    "granitemoehybrid": {"hidden_size": 64, "shared_intermediate_size": 96, "mamba_n_heads": 4, "mamba_d_head": 32},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        **{"hidden_size": 64, "intermediate_size": 96, "mamba_head_dim": 32},
    },
    "glm4": {"hidden_size": 64, "intermediate_size": 96},
    "smollm3": {"hidden_size": 64, "intermediate_size": 96},
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "qwen3_next": {"hidden_size": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_5_text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def in_mxfp4(model: Path) -> None:
    """Gives a gpt-oss model random experts as its releases have them."""
    tensors, rng = load_file(model / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=rng).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, generator=rng).to(torch.uint8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
