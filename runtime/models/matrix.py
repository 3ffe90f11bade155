"""How each architecture runs: by our own decoder, or through transformers, with drafts or without, or not at all.

Nothing of it is looked up: our decoder is asked whether it knows the configuration, and of the others a tiny random
model is made and run, as `hf_probe` runs any model that is loaded.
"""

from dataclasses import dataclass
from typing import Any, Literal

from runtime.errors import UserError
from runtime.model.hf_adapter import Adapter
from runtime.model.load import own_architecture
from runtime.models.tiny import tiny_model

Class = Literal["exact", "measured", "plain", "refused"]
CLASSES: dict[Class, str] = {
    "exact": "our own decoder: the same bits at every width, trees, batches, quantised and paged caches",
    "measured": "through transformers, with drafts: the text is plain decoding's but for rounding",
    "plain": "through transformers, without drafts",
    "refused": "does not run here",
}
_STEPS = {
    "several": "",
    "single": "its cache takes one token at a time",
    "anew": "without a cache: every forward reads the whole text again",
}
# What a class's default values leave open and no checkpoint does.
_LEFT_OPEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}


@dataclass(frozen=True)
class Row:
    """One architecture: its `model_type`, transformers' class, how it runs, and what is to be said of that."""

    model_type: str
    name: str
    runs: Class
    note: str = ""


def model_types() -> dict[str, str]:
    """transformers' class of each `model_type` that it knows as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {kind: str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}


def is_exact(model_type: str) -> bool:
    """Whether our own decoder runs the architecture, as its class's own default values describe it."""
    from transformers import CONFIG_MAPPING

    try:
        return own_architecture(CONFIG_MAPPING[model_type](**_LEFT_OPEN.get(model_type, {}))) is not None
    except Exception:  # defaults that contradict one another, or want something that is not installed
        return False


def row(model_type: str) -> Row:
    """How one architecture runs. Raises UserError for a name that transformers does not know."""
    known = model_types()
    if model_type not in known:
        raise UserError(f"{model_type} is no causal language model of the installed transformers: check the name")
    name = known[model_type]
    if is_exact(model_type):
        return Row(model_type, name, "exact")
    try:
        model: Any = tiny_model(model_type)
        capability = Adapter(model.float()).capability
    except UserError as error:
        return Row(model_type, name, "refused", str(error))
    if capability.no_drafts:
        return Row(model_type, name, "plain", capability.no_drafts)
    return Row(model_type, name, "measured", _STEPS[capability.steps])
