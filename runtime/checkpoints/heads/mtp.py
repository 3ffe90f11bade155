"""Multi-token prediction that a model brings in its own checkpoint: which tensors these are, by model type.

DeepSeek V3 (2412.19437) calls them as a block behind the last one, which GLM 4.5 and others took over; Qwen 3.5 has a
module `mtp`, MiMo (2505.07608) a list `mtp_layers`. Where there are several layers, the first one drafts all tokens.
"""

from functools import partial

from runtime.checkpoints.heads.layouts import Layout, Values, inner, read_layers, whole
from runtime.checkpoints.heads.record import HeadDescription
from runtime.errors import UserError

# Model types whose layer is one of Qwen 3.5's kind; of a composite the language model's.
_QWEN = ("qwen3_next", "qwen3_5_text")


def mtp_layout(values: Values, shown: str) -> tuple[Layout, str]:
    """How the head in a whole model's checkpoint is read, and how the names of its tensors begin.

    Raises UserError for a model without one, and for one whose layer is of a kind that is not run.
    """
    text = inner(values, "text_config", shown) or values
    kind = str(text.get("model_type"))
    if kind in _QWEN:
        names = (
            ("mtp.fc.", "join."),
            ("mtp.pre_fc_norm_hidden.", "join_hidden_norm."),
            ("mtp.pre_fc_norm_embedding.", "join_token_norm."),
            ("mtp.", ""),
        )
        return Layout("Qwen", partial(_describe, normed=True), names), "mtp."
    if kind == "mimo":
        names = (
            ("model.mtp_layers.0.input_proj.", "join."),
            ("model.mtp_layers.0.hidden_layernorm.", "join_hidden_norm."),
            ("model.mtp_layers.0.token_layernorm.", "join_token_norm."),
            ("model.mtp_layers.0.final_layernorm.", "norm."),
            ("model.mtp_layers.0.", "layers.0."),
        )
        return Layout("MiMo", partial(_describe, normed=True), names, hidden_first=True), "model.mtp_layers.0."
    if text.get("num_nextn_predict_layers"):
        place = f"model.layers.{whole(text, 'num_hidden_layers', shown)}."
        names = (
            (f"{place}eh_proj.", "join."),
            (f"{place}hnorm.", "join_hidden_norm."),
            (f"{place}enorm.", "join_token_norm."),
            (f"{place}shared_head.norm.", "norm."),
            (f"{place}shared_head.head.", "lm_head."),
            (f"{place}embed_tokens.", "embed_tokens."),
            (place, "layers.0."),
        )
        return Layout("DeepSeek", partial(_describe, normed=False), names), place
    raise UserError(
        f"{shown}: a model of type {kind!r} brings no multi-token prediction that is read; choose another drafter"
    )


def _describe(values: Values, shown: str, normed: bool) -> HeadDescription:
    """The record of such a head; normed: whether the next step reads what its last norm gives."""
    text = inner(values, "text_config", shown) or values
    layers = read_layers(text, shown, 1)
    vocab = int(layers.config.vocab_size)
    return HeadDescription("mtp", "the model itself", layers.hidden, vocab, vocab, layers, normed_output=normed)
