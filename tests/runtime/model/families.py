"""Every family that our decoders run: a tiny random model of odd sizes each, with all that sets the family apart."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import formats
from runtime.formats import int4, int8
from tests.conftest import byte_tokenizer

VOCABULARY = 8191
WINDOW = 20
_TYPES = ["sliding_attention", "full_attention"]
# Five query heads to a key head, 40 dimensions each.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 55,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 40,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Of those whose heads divide the hidden size.
_DIVIDED = {"hidden_size": 200, "head_dim": None}
_WIDE = {"head_dim": 72}
# transformers multiplies experts by kernels that want rows of whole 16 bytes.
_QUARTERED = {"hidden_size": 60}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
_LATENT_HEADS: dict[str, Any] = {
    "head_dim": None,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 70,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 24,
    "v_head_dim": 28,
}
_LATENT = _LATENT_HEADS | {
    "moe_intermediate_size": 28,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_SHARING = {"num_experts": 6, "num_experts_per_tok": 2}
_SHARING |= {"moe_intermediate_size": 28, "shared_expert_intermediate_size": 56}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_WIDE,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 60,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        },
    },
    # Keys of two shapes, of which the last layers read those of earlier ones; values that are keys; all else it has.
    "gemma4_text": {
        **_QUARTERED,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "global_head_dim": 36,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCABULARY,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 28,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "vaultgemma": {
        **_WIDE,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 60,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "cwm": {
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    },
    "smollm3": {"head_dim": 96, "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "olmo2": {**_DIVIDED},
    "olmo3": {
        **_DIVIDED,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": _YARN,
        },
    },
    "granite": {**_DIVIDED, **_MULTIPLIERS},
    "glm": {**_WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4": {**_WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "ministral": {"layer_types": _TYPES, "sliding_window": WINDOW},
    "ministral3": {"sliding_window": None, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.4}},
    "seed_oss": {"head_dim": 96, "attention_bias": True},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"attention_bias": True, "mlp_bias": True},
    "arcee": {},
    "jais2": {"attention_bias": True, "mlp_bias": True},
    "hyperclovax": {**_DIVIDED, **_MULTIPLIERS, "logits_scaling": 0.3},
    # A layer that rotates with a base of its own, one with another, one that does not.
    "granite_swa": {
        **_DIVIDED,
        **_MULTIPLIERS,
        "num_hidden_layers": 3,
        "layer_types": [*_TYPES, "sliding_attention"],
        "sliding_window": WINDOW,
        "layer_rope_theta": [1e4, 1e6, 0],
    },
    "exaone4": {"layer_types": _TYPES, "sliding_window": WINDOW},
    "ernie4_5": {"use_bias": True},
    "helium": {"hidden_size": 200},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "starcoder2": {**_DIVIDED, "sliding_window": WINDOW},
    "stablelm": {**_DIVIDED, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "phi": {**_DIVIDED},
    "cohere2_moe": {
        **_DIVIDED,
        **_SHARING,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "logit_scale": 0.3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
    },
    "cohere": {**_DIVIDED, "logit_scale": 0.3, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {**_DIVIDED, "layer_types": _TYPES, "sliding_window": WINDOW, "logit_scale": 0.3},
    "nemotron": {"head_dim": 40},
    "apertus": {**_DIVIDED},
    "gpt2": {"n_embd": 200, "n_layer": 2, "n_head": 5, "n_positions": 512},
    "gpt_bigcode": {"n_embd": 200, "n_layer": 2, "n_head": 5, "n_positions": 512},
    "gpt_neo": {
        **{"hidden_size": 200, "num_layers": 2, "num_heads": 5, "intermediate_size": 88},
        **{"max_position_embeddings": 512, "attention_types": [[["local", "global"], 1]], "window_size": WINDOW},
    },
    "gptj": {"n_embd": 200, "n_layer": 2, "n_head": 5, "n_positions": 512, "rotary_dim": 12},
    "opt": {"hidden_size": 200, "word_embed_proj_dim": 200, "ffn_dim": 88},
    "gpt_neox": {
        **_DIVIDED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "falcon": {**_DIVIDED, "ffn_hidden_size": 88, "tie_word_embeddings": True},
    "olmoe": {**_DIVIDED, "num_experts": 5, "num_experts_per_tok": 2},
    "flex_olmo": {**_DIVIDED, "num_experts": 5, "num_experts_per_tok": 2},
    "mellum": {
        **_QUARTERED,
        **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"layer_types": _TYPES, "sliding_window": WINDOW, "mlp_layer_types": ["sparse", "dense"]},
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}, "full_attention": _YARN},
    },
    "qwen2_moe": {
        **_DIVIDED,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [0],
    },
    "granitemoe": {
        **_DIVIDED,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        **_MULTIPLIERS,
    },
    "granitemoeshared": {
        **_DIVIDED,
        **_MULTIPLIERS,
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 36},
    },
    "granitemoe_swa": {
        **_DIVIDED,
        **_MULTIPLIERS,
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 36},
        **{"layer_types": _TYPES, "sliding_window": WINDOW, "layer_rope_theta": [0, 1e6]},
    },
    "solar_open": {
        **_QUARTERED,
        **{"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
        **{"moe_intermediate_size": 28, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
        "intermediate_size": None,
    },
    "hy_v3": {
        **_QUARTERED,
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "num_shared_experts": 2},
        **{"router_scaling_factor": 1.7, "mlp_layer_types": ["sparse", "dense"]},
    },
    "afmoe": {
        **_QUARTERED,
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "num_shared_experts": 2},
        **{"route_scale": 1.7, "num_dense_layers": 1, "mup_enabled": True, "num_hidden_layers": 3},
        **{"layer_types": [*_TYPES, "sliding_attention"], "sliding_window": WINDOW},
    },
    "glm4_moe": {
        **_QUARTERED,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 28,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "dots1": {
        **_QUARTERED,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 28,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
    },
    "exaone_moe": {
        **_QUARTERED,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 28,
        "num_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense"],
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
    },
    "ernie4_5_moe": {
        **_QUARTERED,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 28,
        "moe_num_shared_experts": 2,
        "use_bias": True,
    },
    "hunyuan_v1_moe": {
        **_QUARTERED,
        "num_experts": 5,
        "moe_topk": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    # Layers of each kind: a chunk or all of the text, dense or a mixture.
    "llama4_text": {
        **_QUARTERED,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
        "intermediate_size_mlp": 88,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": WINDOW,
        "floor_scale": 8,
        "attn_scale": 0.4,
    },
    "phimoe": {
        **_DIVIDED,
        "num_local_experts": 5,
        "router_jitter_noise": 0.3,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "minimax_m2": {**_QUARTERED, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
    # With a vector of queries and without.
    "deepseek_v2": {
        **_QUARTERED,
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 3.0,
        "n_shared_experts": 2,
    },
    "deepseek_v3": {
        **_QUARTERED,
        **_LATENT,
        "q_lora_rank": 52,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "glm4_moe_lite": {
        **_QUARTERED,
        **_LATENT,
        "q_lora_rank": 52,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "youtu": {**_LATENT_HEADS, "q_lora_rank": 52, "tie_word_embeddings": True, "pad_token_id": None},
    "gpt_oss": {
        **_QUARTERED,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "layer_types": _TYPES,
        "sliding_window": WINDOW,
        "rope_parameters": _YARN,
        "swiglu_limit": 0.4,
    },
    # Two layers with states, of two sizes of steps apart from the cache's own layers.
    "lfm2": {
        **_DIVIDED,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 4,
        "conv_bias": True,
        "block_multiple_of": 8,
    },
    "lfm2_moe": {
        **_QUARTERED,
        "head_dim": None,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "routed_scaling_factor": 1.7,
    },
    "lfm3": {
        **_QUARTERED,
        **{"num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
        **{"conv_L_cache": 5, "conv_bias": True, "sliding_window": WINDOW},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    # Layers of delta rules on both sides of attention; two value heads to a key head, of other dimensions.
    "qwen3_next": {**_QUARTERED, **_DELTA, **_SHARING, "mlp_only_layers": [0]},
    "qwen3_5_text": {**_QUARTERED, **_DELTA},
    "qwen3_5_moe_text": {**_QUARTERED, **_DELTA, **_SHARING},
    # State spaces alone: biases everywhere, steps that meet both of their limits.
    "mamba2": {
        **{"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None},
        **{"num_heads": 10, "head_dim": 11, "n_groups": 5, "state_size": 13, "conv_kernel": 3},
        **{
            "use_bias": True,
            "time_step_limit": [0.1, 1.5],
            "layer_norm_epsilon": 1e-3,
            "max_position_embeddings": None,
        },
    },
    # Blocks of every kind, two with states.
    "nemotron_h": {
        **_QUARTERED,
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        **{"mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 3, "ssm_state_size": 10, "time_step_min": 0.3},
        **{"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36, "routed_scaling_factor": 1.7},
        **{"use_bias": True, "mlp_bias": True},
    },
    "granitemoehybrid": {
        **_QUARTERED,
        "head_dim": None,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_proj_bias": True},
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 36},
        **_MULTIPLIERS,
    },
    "bamba": {
        **_QUARTERED,
        "head_dim": None,
        **{"num_hidden_layers": 3, "attn_layer_indices": [1]},
        **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_proj_bias": True},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 10, "mamba_d_head": 12},
        **{"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True},
        **{"mlp_bias": True, "mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.6, 1.4, 0.8, 1.2, 0.9]},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.4, "ssm_in_multiplier": 1.3},
        **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_out_multiplier": 0.5},
    },
}


# Of these the sizes have other names.
_GPT = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj")


def config(kind: str, **more: Any) -> Any:
    """The transformers configuration of a family; `more` in place of the table's, or taken away by None."""
    from transformers import AutoConfig

    shape = {key: _SHAPE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} if kind in _GPT else _SHAPE
    # None takes a key of the common shape away; of others it is a value, as that of DeepSeek-V2-Lite's q_lora_rank.
    told = {k: v for k, v in (shape | FAMILIES[kind] | more).items() if v is not None or k not in shape}
    return AutoConfig.for_model(kind, **told)


def write(kind: str, path: Path, **more: Any) -> Path:
    """Writes the model, with `more` in its configuration: all of its tensors random, norms and biases as well, so that
    none can be left out unnoticed."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config(kind, **more), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
            elif name.endswith("layer_scalar"):
                tensor.mul_(0.8)
            elif not isinstance(tensor, torch.nn.Parameter):
                continue
            elif tensor.dim() == 1 or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            else:
                tensor.copy_(torch.randn_like(tensor) * (1.2 / tensor.shape[-1] ** 0.5))
            if kind in ("gemma4_text", "gpt_neo") and name.endswith(("q_norm.weight", "attention.q_proj.weight")):
                # Their scores are not divided by anything: a trained model's weights keep them small.
                tensor.mul_(0.2)
    made.save_pretrained(path)
    # Speculator wants a tokenizer; what it says of most tokens is nothing.
    byte_tokenizer().save_pretrained(path)
    return path


def pack(source: Path, out: Path, scheme: str) -> tuple[Path, Path]:
    """The model with its linear layers packed, and beside it the same with what the codes stand for, plain."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    packed, plain, schemes = {}, {}, {}
    # Experts have one scheme: groups only where they divide the inputs of all.
    whole_experts = any(tensor.shape[-1] % 8 for name, tensor in tensors.items() if ".experts." in name)
    for name, tensor in tensors.items():
        packed[name] = plain[name] = tensor
        prefix = name.removesuffix(".weight")
        if tensor.dim() != 2 or name == prefix or any(word in name for word in _PLAIN):
            continue
        turned = config["model_type"] == "gpt2"
        weight = tensor.t().contiguous() if turned else tensor
        made = (
            int8.pack(weight)
            if scheme == "int8"
            else int4.pack(weight, 0 if weight.shape[1] % 8 or (whole_experts and ".experts." in name) else 8)
        )
        schemes[prefix] = made.scheme
        del packed[name]
        packed |= formats.to_tensors(made, prefix, torch.float32)
        whole = formats.dequantize(made)
        plain[name] = whole.t().contiguous() if turned else whole
    more = {"quantization_config": formats.hf_config(schemes, ["lm_head"])}
    for folder, held, told in ((out / "packed", packed, config | more), (out / "plain", plain, config)):
        shutil.copytree(source, folder)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(told))
    return out / "packed", out / "plain"


# What is no linear layer, or stays plain: embeddings, heads, routers, norms, learned positions.
_PLAIN = ("embed", "lm_head", "wte", "wpe", ".gate.", "router", "shared_expert_gate", "norm", "experts.gate", "ln_")
