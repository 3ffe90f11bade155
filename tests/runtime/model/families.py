"""Every family that our decoders run: a tiny random model of odd sizes each, with all that sets the family apart."""

from pathlib import Path
from typing import Any

import torch

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
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
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
    "granite": {
        **_DIVIDED,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "glm4": {**_WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "ministral": {"layer_types": _TYPES, "sliding_window": WINDOW},
    "ministral3": {"sliding_window": None, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.4}},
    "seed_oss": {"head_dim": 96, "attention_bias": True},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "arcee": {},
    "exaone4": {"layer_types": _TYPES, "sliding_window": WINDOW},
    "ernie4_5": {"use_bias": True},
    "helium": {"hidden_size": 200},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "starcoder2": {**_DIVIDED, "sliding_window": WINDOW},
    "stablelm": {**_DIVIDED, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "phi": {**_DIVIDED},
    "cohere2": {**_DIVIDED, "layer_types": _TYPES, "sliding_window": WINDOW, "logit_scale": 0.3},
    "nemotron": {"head_dim": 40},
    "apertus": {**_DIVIDED},
}


def config(kind: str) -> Any:
    """The transformers configuration of a family."""
    from transformers import AutoConfig

    told = {key: value for key, value in (_SHAPE | FAMILIES[kind]).items() if value is not None}
    return AutoConfig.for_model(kind, **told)


def write(kind: str, path: Path) -> Path:
    """Writes the model: all of its tensors random, norms and biases as well, so that none can be left out unnoticed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if tensor.dim() == 1 or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            else:
                tensor.copy_(torch.randn_like(tensor) * (1.2 / tensor.shape[-1] ** 0.5))
    made.save_pretrained(path)
    return path
