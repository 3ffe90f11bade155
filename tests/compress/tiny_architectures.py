"""Tiny random models of any causal language model that transformers builds, with the shipped pair's tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import torch

from runtime.models.tiny import tiny_model

PAIR = Path(__file__).parents[2] / "examples" / "pair" / "target"
# All that Gemma 4 has and its default values leave out: keys of two shapes that later layers share, a mixture.
GEMMA4: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8, "num_kv_shared_layers": 3},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 4096, "use_double_wide_mlp": True},
    **{"attention_k_eq_v": True, "max_position_embeddings": 512, "final_logit_softcapping": 30.0},
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
}
# Of a tower for images.
_TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64},
}


def make(model_type: str, out: Path) -> None:
    """Writes a random bfloat16 model of a `model_type`. Raises UserError where none can be built."""
    model = gemma4() if model_type == "gemma4_text" else tiny_model(model_type)
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / name, out)


def gemma4(kind: str = "gemma4_text", **changed: Any) -> Any:
    """A random Gemma 4 in float32, its norms and scales random, too; with a tower for images as "gemma4".

    changed  keys of the language model's configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto, told = (AutoModelForCausalLM, GEMMA4 | changed)
    if kind == "gemma4":
        auto, told = AutoModelForImageTextToText, {"text_config": GEMMA4 | changed, "vision_config": _TOWER}
    model = auto.from_config(AutoConfig.for_model(kind, **told), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("layer_scalar"):
                tensor.mul_(0.8)
            elif tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            # Scores are not divided by anything: a trained model's weights keep them small.
            if name.endswith("q_norm.weight"):
                tensor.mul_(0.2)
    return model
