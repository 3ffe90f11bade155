"""A GGUF file's metadata as the configuration (config.json) that the decoder reads."""

from typing import Any

from runtime.checkpoints.gguf.families import FAMILIES, Family
from runtime.checkpoints.gguf.keys import Keys, brief
from runtime.checkpoints.gguf.names import EMBEDDING, HEAD
from runtime.checkpoints.gguf.reader import Header, damaged
from runtime.checkpoints.gguf.rope import rope_parameters
from runtime.checkpoints.rotation import said_in
from runtime.errors import UserError


def configure(header: Header) -> dict[str, Any]:
    """The configuration of a file, in transformers' words.

    Raises UserError for an architecture that is not run, missing or malformed keys, and ones that contradict the
    tensors.
    """
    keys = Keys(header)
    if (parts := header.metadata.get("split.count")) not in (None, 0, 1):
        raise UserError(f"{keys.shown} is one of {brief(parts)} parts; join them with llama-gguf-split --merge")
    if (kind := header.metadata.get("general.type")) not in (None, "model"):
        raise UserError(f"{keys.shown} holds {brief(kind)}, expected a model; give the model's own GGUF file")
    if EMBEDDING not in header.tensors:
        raise UserError(f"{keys.shown}: tensor {EMBEDDING} is missing; the file is no whole model, so fetch it again")
    embedding = header.tensors[EMBEDDING]
    if len(embedding.shape) != 2:
        raise UserError(f"{keys.shown}: tensor {EMBEDDING} must have 2 dimensions, found {list(embedding.shape)}")
    vocab, hidden = embedding.shape
    layers = keys.whole("block_count")
    if layers > len(header.tensors):
        what = f"{keys.architecture}.block_count is {layers}, but there are {len(header.tensors)} tensors"
        raise damaged(keys.shown, what)
    # Layers that predict further tokens come last, and are not run.
    layers -= int(keys.real("nextn_predict_layers", 0))
    if layers < 1:
        raise damaged(keys.shown, f"{keys.architecture}.nextn_predict_layers leaves {layers} layers")
    if (said := keys.whole("embedding_length")) != hidden:
        raise UserError(f"{keys.shown}: embedding_length is {said}, and {EMBEDDING} has rows of {hidden}")
    family = FAMILIES[keys.architecture]
    kind, plain = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    # llama.cpp's own files of Nemotron-H have the other.
    if not family.rms or (keys.get(kind) is None and keys.get(plain) is not None):
        kind = plain
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        family.eps: keys.number(kind),
        "hidden_act": "silu",
        # A quantised embedding is a table of floats here, and the head keeps its blocks.
        "tie_word_embeddings": HEAD not in header.tensors and embedding.kind.plain,
    }
    if family.attends:
        config |= _attention(keys, family, hidden, layers)
    config |= family.fixed
    if family.more is not None:
        config |= family.more(keys, config)
    if not family.sized:
        del config["head_dim"]
    config |= _special_ids(header, vocab) | said_in(header.metadata, keys.shown)
    return config | {"quantization_config": {"quant_method": "gguf"}}


def _attention(keys: Keys, family: Family, hidden: int, layers: int) -> dict[str, Any]:
    """Attention's heads and rotation, and what follows it. Raises UserError for values of another size than keys."""
    heads = keys.whole("attention.head_count")
    size = keys.whole("attention.key_length", max(hidden // heads, 1))
    latent = keys.get("attention.kv_lora_rank") is not None
    if not latent and keys.whole("attention.value_length", size) != size:
        raise UserError(f"{keys.shown}: keys and values of different sizes are not run; give another model")
    key_heads, length = "attention.head_count_kv", "feed_forward_length"
    of_layers = {"missing": keys.common, "different": keys.first}.get(family.mixed)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": of_layers(key_heads, layers) if of_layers else keys.whole(key_heads, heads),
        "head_dim": size,
        "intermediate_size": of_layers(length, layers) if of_layers else keys.whole(length),
        "max_position_embeddings": keys.whole("context_length"),
        "rope_parameters": rope_parameters(keys, size),
    }


def _special_ids(header: Header, vocab: int) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill a text. A text also ends where a turn does (eot)."""
    ids: dict[str, Any] = {}
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("eot", "eot"), ("padding", "pad_token_id")):
        value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocab:
            raise UserError(
                f"{header.path.name}: tokenizer.ggml.{key}_token_id must be one of {vocab} tokens, found {brief(value)}"
            )
        ids[name] = value
    turn, end = ids.pop("eot", None), ids.get("eos_token_id")
    return ids if turn is None or end in (None, turn) else ids | {"eos_token_id": [end, turn]}
