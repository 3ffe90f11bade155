"""The families of tests/runtime/model/families.py that GGUF can hold: what of each has to be otherwise for that."""

import json
from pathlib import Path
from typing import Any

from tests.runtime.model import families

_DIVIDED: dict[str, Any] = {"hidden_size": 200, "head_dim": 40}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
_TOGETHER = {"mscale": 1.3, "mscale_all_dim": 1.3}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 72},
    "gemma3_text": {"query_pre_attn_scalar": 40},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "olmo2": {},
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": _YARN,
        }
    },
    "granite": {},
    "glm4": {},
    "ministral3": {},
    "seed_oss": {"attention_out_bias": False},
    "arcee": {},
    "exaone4": {**_DIVIDED, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "ernie4_5": {"use_bias": False},
    "hunyuan_v1_dense": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "phi": {},
    "cohere2": {"tie_word_embeddings": True},
    "nemotron": {**_DIVIDED},
    "gpt2": {},
    "gpt_neox": {},
    "falcon": {},
    "olmoe": {"num_key_value_heads": 5},
    "qwen2_moe": {"mlp_only_layers": []},
    "granitemoe": {},
    "deepseek_v2": {"num_hidden_layers": 26, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {"attention_bias": False, "rope_parameters": {**_YARN, **_TOGETHER}},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": {"swiglu_limit": 7.0, "head_dim": 40},
    "qwen3_next": {"mlp_only_layers": [], "linear_value_head_dim": 20},
    "qwen3_5_text": {"linear_value_head_dim": 20},
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
}


def write(kind: str, path: Path, **changes: Any) -> Path:
    """The family's tiny random model, its tokenizer splitting text like GPT-2's."""
    known = families.FAMILIES[kind]
    families.FAMILIES[kind] = known | CHANGES[kind] | changes
    try:
        families.write(kind, path)
    finally:
        families.FAMILIES[kind] = known
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = True
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path
