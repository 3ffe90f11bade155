"""Multi-token prediction that a model brings in its own checkpoint: which tensors these are, by model type.

DeepSeek V3 (2412.19437) calls them as a block behind the last one, which GLM 4.5 and others took over; Qwen 3.5 has a
module `mtp`, MiMo (2505.07608) a list `mtp_layers`. Where there are several layers, the first one drafts all tokens.
"""

from functools import partial

from runtime.checkpoints.heads.layouts import Layout, Values, inner, read_layers, whole
from runtime.checkpoints.heads.record import HeadDescription
from runtime.errors import UserError

Names = tuple[tuple[str, str], ...]


def _describe(values: Values, shown: str, normed: bool) -> HeadDescription:
    """The record of such a head; normed: whether the next step reads what its last norm gives."""
    text = inner(values, "text_config", shown) or values
    layers = read_layers(text, shown, 1)
    vocab = int(layers.config.vocab_size)
    return HeadDescription("mtp", "the model itself", layers.hidden, vocab, vocab, layers, normed_output=normed)


def _names(place: str, block: str, join: str, token_norm: str, hidden_norm: str, norm: str) -> Names:
    """What the record calls the tensors of a layer whose names begin with `place`, its block's with `block`."""
    parts = {join: "join", token_norm: "join_token_norm", hidden_norm: "join_hidden_norm", norm: "norm"}
    return (*((f"{place}{old}.", f"{new}.") for old, new in parts.items()), (f"{place}{block}", "layers.0."))


_QWEN = _names("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_MIMO_PLACE = "model.mtp_layers.0."
_MIMO = _names(_MIMO_PLACE, "", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
# By the model type (of a composite the language model's): the layout, and how the names of its tensors begin.
BY_TYPE: dict[str, tuple[Layout, str]] = {
    "qwen3_next": (Layout("Qwen", partial(_describe, normed=True), _QWEN), "mtp."),
    "qwen3_5_text": (Layout("Qwen", partial(_describe, normed=True), _QWEN), "mtp."),
    "mimo": (Layout("MiMo", partial(_describe, normed=True), _MIMO, hidden_first=True), _MIMO_PLACE),
}


def mtp_layout(values: Values, shown: str) -> tuple[Layout, str]:
    """How the head in a whole model's checkpoint is read, and how the names of its tensors begin.

    Raises UserError for a model without one, and for one whose layer is of a kind that is not run.
    """
    text = inner(values, "text_config", shown) or values
    kind = str(text.get("model_type"))
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    if not text.get("num_nextn_predict_layers"):
        raise UserError(
            f"{shown}: a model of type {kind!r} brings no multi-token prediction that is read; choose another drafter"
        )
    place = f"model.layers.{whole(text, 'num_hidden_layers', shown)}."
    own: Names = ((f"{place}shared_head.head.", "lm_head."), (f"{place}embed_tokens.", "embed_tokens."))
    names = own + _names(place, "", "eh_proj", "enorm", "hnorm", "shared_head.norm")
    return Layout("DeepSeek", partial(_describe, normed=False), names), place
