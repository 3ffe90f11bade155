"""Which models the decoder runs, described as data: one frozen record per checkpoint, from its config.json.

families/ has who says what a family is.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.families import FAMILIES
from runtime.checkpoints.record import Architecture
from runtime.errors import UserError, fault_of

__all__ = ["Architecture", "configuration", "describe", "in_towers", "language_model", "transformers_configuration"]

# Checkpoints with towers for images, whose language model alone says what follows a text; and where they have it: its
# parts, its head.
COMPOSITES = (
    *("gemma3", "gemma4", "llama4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
    *("qwen3_5_moe", "exaone4_5", "idefics3", "internvl", "lfm2_vl", "lfm3_vl", "llava", "llava_next"),
    *("llava_onevision", "smolvlm"),
)
_PLACES = (
    ("language_model.model.", "language_model.lm_head"),
    ("model.language_model.", "lm_head"),
    ("model.text_model.", "lm_head"),
    ("model.", "lm_head"),
)
# Language models that only composites have, and whose they are: a text's positions are the same in all three axes.
_INSIDE: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}

# Names that do not begin with a block's.
_OF_MODEL = ("embedding", "block", "norm", "layer_table", "layer_projection", "layer_norm")

# A Llama file with these keys leaves nothing to a default that only transformers knows …
_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "head_dim", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
)
# … given that these are absent or false: they change what the others mean.
_PLAIN = ("use_sliding_window", "sliding_window", "rope_scaling", "layer_types", "auto_map")


def configuration(checkpoint: Checkpoint) -> Any:
    """The configuration's values as attributes.

    Importing transformers takes longer than reading a billion weights, so it is left out where the file alone says it
    all. Raises UserError for a type that is no causal language model, and for what cannot be read.
    """
    values = checkpoint.config
    return SimpleNamespace(**values) if _complete(values) else transformers_configuration(checkpoint)


def _complete(values: dict[str, Any]) -> bool:
    """Whether nothing is left open; of what is there open_checkpoint has checked the types (model_config.py)."""
    if values.get("model_type") != "llama" or any(values.get(key) for key in _PLAIN):
        return False
    rope = values.get("rope_parameters") or {}
    plain = rope.get("rope_type") == "default" and rope.get("rope_theta") and set(rope) == {"rope_type", "rope_theta"}
    return bool(plain) and all(values.get(key) is not None for key in _KEYS)


def transformers_configuration(checkpoint: Checkpoint) -> Any:
    """The configuration as transformers reads it. Raises UserError as `configuration` does."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as autos

    kind = checkpoint.config.get("model_type")
    # A language model, or one with a language model inside (model/hf_classes.py).
    if kind not in autos.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in autos.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{checkpoint.path.name}/config.json: model_type {kind!r} is no causal language model that transformers"
            " knows; use one of its decoder-only architectures"
        )
    with fault_of(f"{checkpoint.path.name}/config.json", f"cannot be read as a {kind} configuration"):
        if checkpoint.path.is_file():
            plain = ("model_type", "quantization_config")
            return AutoConfig.for_model(kind, **{k: v for k, v in checkpoint.config.items() if k not in plain})
        return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)


def describe(config: dict[str, Any]) -> Architecture | None:
    """The architecture of a config.json, or None where the decoder does not know the family.

    Raises UserError where the family is known and a key it needs is missing or has a value that cannot be run.
    """
    config = config | _INSIDE.get(str(config.get("model_type")), {})
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family(config)


def language_model(config: Any) -> Any:
    """The configuration of the language model in a composite that our decoders take apart; any other as it is."""
    composite = getattr(config, "model_type", None) in COMPOSITES
    return config.get_text_config(decoder=True) if composite else config


def in_towers(a: Architecture, checkpoint: Checkpoint) -> Architecture | None:
    """The language model `a` as a composite's checkpoint names its tensors; None where it does so in another way.

    Whether it is tied is what the file says: the configurations of the whole and of its part may contradict each other.
    """
    held = set(checkpoint.names())
    for prefix, head in _PLACES:
        parts = {key: getattr(a.names, key) for key in _OF_MODEL}
        moved = {key: name.replace("model.", prefix, 1) for key, name in parts.items()}
        if f"{moved['norm']}.weight" in held:
            tied = not any(name.startswith(f"{head}.") for name in held)
            return replace(a, names=replace(a.names, **moved, head=head), tied=tied)
    return None
