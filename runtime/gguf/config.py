"""A GGUF file's metadata as the configuration (config.json) that the decoder reads."""

from typing import Any

from runtime.errors import UserError
from runtime.gguf.header import Header, TensorEntry
from runtime.gguf.keys import Keys, brief
from runtime.gguf.rope import rope_parameters

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Each expert gets names of its own, so a count out of a damaged file must be a sane one.
_MOST_EXPERTS = 1 << 14


def configure(header: Header) -> dict[str, Any]:
    """The configuration of a file, in transformers' words.

    Raises UserError for an architecture that is not run, missing or malformed keys, and ones that contradict the
    tensors.
    """
    keys = Keys(header)
    for key in ("split.count", "general.type"):
        _check_whole_model(keys.shown, key, header.metadata.get(key))
    embedding = _entry(header, EMBEDDING)
    if len(embedding.shape) != 2:
        raise UserError(f"{keys.shown}: tensor {EMBEDDING} must have 2 dimensions, found {list(embedding.shape)}")
    vocab, hidden = embedding.shape
    layers, heads = keys.whole("block_count"), keys.whole("attention.head_count")
    if layers > len(header.tensors):
        raise UserError(
            f"{keys.shown}: {keys.architecture}.block_count is {layers}, but there are {len(header.tensors)} tensors;"
            " the file is damaged, so fetch it again"
        )
    if (said := keys.whole("embedding_length")) != hidden:
        raise UserError(f"{keys.shown}: embedding_length is {said}, and {EMBEDDING} has rows of {hidden}")
    size = keys.whole("attention.key_length", keys.whole("rope.dimension_count", max(hidden // heads, 1)))
    if keys.whole("attention.value_length", size) != size:
        raise UserError(f"{keys.shown}: keys and values of different sizes are not run; give another model")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": size,
        "intermediate_size": keys.whole("feed_forward_length"),
        "vocab_size": vocab,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        # A quantised embedding is a table of floats here, and the head keeps its blocks.
        "tie_word_embeddings": HEAD not in header.tensors and embedding.kind.plain,
        "rope_parameters": rope_parameters(keys, size),
    }
    config |= _family(keys, header) | _special_ids(header, vocab)
    return config | {"quantization_config": {"quant_method": "gguf"}}


def _check_whole_model(shown: str, key: str, value: Any) -> None:
    if key == "split.count" and value not in (None, 0, 1):
        raise UserError(f"{shown} is one of {brief(value)} parts; join them with llama-gguf-split --merge")
    if key == "general.type" and value not in (None, "model"):
        raise UserError(f"{shown} holds {brief(value)}, expected a model; give the model's own GGUF file")


def _entry(header: Header, name: str) -> TensorEntry:
    if name not in header.tensors:
        raise UserError(f"{header.path.name}: tensor {name} is missing; the file is no whole model, so fetch it again")
    return header.tensors[name]


def _family(keys: Keys, header: Header) -> dict[str, Any]:
    """What only some architectures have."""
    kind = keys.architecture
    if kind == "llama" and keys.has("expert_count"):
        return {"model_type": "mixtral", "sliding_window": None} | _experts(keys, "num_local_experts")
    if kind == "llama":
        biased = [any(f".{part}.bias" in name for name in header.tensors) for part in ("attn_q", "ffn_up")]
        return {"model_type": "llama", "attention_bias": biased[0], "mlp_bias": biased[1]}
    if kind == "qwen3moe":
        # llama.cpp always divides by the sum of the chosen experts' weights here.
        return {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        } | _experts(keys, "num_experts")
    if kind == "gemma":
        return {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if kind == "phi3":
        window = keys.whole("attention.sliding_window") if keys.has("attention.sliding_window") else None
        return {"model_type": "phi3", "sliding_window": window}
    return {"model_type": kind}


def _experts(keys: Keys, name: str) -> dict[str, Any]:
    count, used = keys.whole("expert_count"), keys.whole("expert_used_count")
    if not used <= count <= _MOST_EXPERTS:
        raise UserError(
            f"{keys.shown}: {keys.architecture}.expert_used_count {used} and expert_count {count} must rise, to at most"
            f" {_MOST_EXPERTS}; the file is damaged, so fetch it again"
        )
    return {name: count, "num_experts_per_tok": used}


def _special_ids(header: Header, vocab: int) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill a text. A text also ends where a turn does (eot)."""
    found: dict[str, int] = {}
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("eot", "eot"), ("padding", "pad_token_id")):
        value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocab:
            raise UserError(
                f"{header.path.name}: tokenizer.ggml.{key}_token_id must be one of {vocab} tokens, found {brief(value)}"
            )
        found[name] = value
    turn, end = found.pop("eot", None), found.get("eos_token_id")
    ids: dict[str, Any] = dict(found)
    if turn is not None and end is not None and turn != end:
        ids["eos_token_id"] = [end, turn]
    return ids
