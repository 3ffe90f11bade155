"""Multi-token prediction that a model brings in its own checkpoint: what its tensors are called.

DeepSeek V3 (2412.19437) has a block behind the last one, which GLM 4.5 and others took over; Qwen3-Next and Qwen 3.5
have a module `mtp`. The block itself is one of the model's own (speculative/heads/own_layer.py); here is what stands
around it. Where there are several layers, the first one drafts all tokens.
"""

from functools import partial

from runtime.checkpoints.heads.layouts import Layout, Values, inner, whole
from runtime.checkpoints.heads.record import HeadDescription, HeadLayers
from runtime.errors import UserError

# Of Qwen's: the beginnings of names before the record's.
_QWEN = (
    ("mtp.fc.", "join."),
    ("mtp.pre_fc_norm_embedding.", "join_token_norm."),
    ("mtp.pre_fc_norm_hidden.", "join_hidden_norm."),
    ("mtp.norm.", "norm."),
    ("mtp.embed_tokens.", "embed_tokens."),
)
_QWEN_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def mtp_layout(values: Values, shown: str) -> tuple[Layout, str]:
    """How the head in a whole model's checkpoint is read, and how the names of its block's tensors begin.

    Raises UserError for a model without one.
    """
    text = inner(values, "text_config", shown) or values
    kind = str(text.get("model_type"))
    if kind in _QWEN_TYPES:
        return Layout("Qwen", partial(_describe, unit_norms=True, normed=True), _QWEN), "mtp.layers.0."
    if not text.get("num_nextn_predict_layers"):
        raise UserError(
            f"{shown}: a model of type {kind!r} brings no multi-token prediction that is read; choose another drafter"
        )
    place = f"model.layers.{whole(text, 'num_hidden_layers', shown)}."
    parts = {"eh_proj": "join", "enorm": "join_token_norm", "hnorm": "join_hidden_norm", "shared_head.norm": "norm"}
    parts |= {"shared_head.head": "lm_head", "embed_tokens": "embed_tokens"}
    names = tuple((f"{place}{old}.", f"{new}.") for old, new in parts.items())
    return Layout("DeepSeek", partial(_describe, unit_norms=False, normed=False), names), place


def _describe(values: Values, shown: str, unit_norms: bool, normed: bool) -> HeadDescription:
    """The record of what stands around the block; normed: whether the next step reads what the last norm gives."""
    text = inner(values, "text_config", shown) or values
    hidden, vocab = whole(text, "hidden_size", shown), whole(text, "vocab_size", shown)
    eps = float(text.get("rms_norm_eps") or 1e-6)
    layers = HeadLayers(hidden, 1, 1, 1, 1, 0, eps, "silu", (), None, unit_norms=unit_norms)
    return HeadDescription("mtp", "the model itself", hidden, vocab, vocab, layers, normed_output=normed)
