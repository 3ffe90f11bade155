"""config.json as the decoder needs it: read as it stands where it says everything, through transformers otherwise."""

from types import SimpleNamespace
from typing import Any

from runtime.checkpoint import Checkpoint
from runtime.errors import UserError

# A Llama file with these keys leaves nothing to a default that only transformers knows …
_SPELLED_OUT = ("llama",)
_KEYS: dict[str, type | tuple[type, ...]] = {
    "num_hidden_layers": int,
    "hidden_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "intermediate_size": int,
    "vocab_size": int,
    "max_position_embeddings": int,
    "head_dim": int,
    "rms_norm_eps": (int, float),
    "hidden_act": str,
    "tie_word_embeddings": bool,
    "rope_parameters": dict,
}
# … given that these are absent or false: they change what the others mean.
_PLAIN = ("use_sliding_window", "sliding_window", "rope_scaling", "layer_types", "auto_map")


def configuration(checkpoint: Checkpoint) -> Any:
    """The configuration's values as attributes.

    Importing transformers takes longer than reading a billion weights, so it is left out where the file alone says it
    all. Raises UserError for a type that is no causal language model, and for what cannot be read.
    """
    values = checkpoint.config
    if _complete(values):
        return SimpleNamespace(**values)
    return transformers_configuration(checkpoint)


def _complete(values: dict[str, Any]) -> bool:
    if values.get("model_type") not in _SPELLED_OUT or any(values.get(key) for key in _PLAIN):
        return False
    for key, kind in _KEYS.items():
        # A bool is an int to Python, and a mistake here.
        if not isinstance(values.get(key), kind) or (kind is int and isinstance(values[key], bool)):
            return False
    rope = values["rope_parameters"]
    plain = rope.get("rope_type") == "default" and isinstance(rope.get("rope_theta"), int | float)
    return plain and set(rope) == {"rope_type", "rope_theta"}


def transformers_configuration(checkpoint: Checkpoint) -> Any:
    """The configuration as transformers reads it. Raises UserError as `configuration` does."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = checkpoint.config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{checkpoint.path.name}/config.json: model_type {kind!r} is no causal language model that transformers"
            " knows; use one of its decoder-only architectures"
        )
    try:
        if checkpoint.path.is_file():
            plain = ("model_type", "quantization_config")
            return AutoConfig.for_model(kind, **{k: v for k, v in checkpoint.config.items() if k not in plain})
        return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{checkpoint.path.name}/config.json cannot be read as a {kind} configuration: {why}"
        ) from error
