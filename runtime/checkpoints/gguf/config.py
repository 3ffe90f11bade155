"""A GGUF file's metadata as the configuration (config.json) that the decoder reads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.names import ARCHITECTURES, ROPE_FACTORS
from runtime.checkpoints.gguf.reader import F32, Header, damaged
from runtime.errors import UserError


class Keys:
    """The keys of one file's architecture, checked as they are asked for."""

    def __init__(self, header: Header):
        """Raises UserError where the file names no architecture, or one that is not run."""
        self.header, self.shown = header, header.path.name
        found = header.metadata.get("general.architecture")
        if found not in ARCHITECTURES.values():
            known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
            raise UserError(
                f"{self.shown}: general.architecture {found!r} is not run from a GGUF file; {known} are, and for others"
                " give the original model directory"
            )
        self.architecture = str(found)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; an array of equal ones (a value for each layer) counts as one."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        equal = isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all())
        return value[0].item() if equal else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises UserError where it is missing and has no default, or is something else."""
        return int(self._positive(key, "integer", int, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number. Raises UserError as `whole`."""
        return float(self._positive(key, "number", int | float, default))

    def _positive(self, key: str, noun: str, kinds: Any, default: float | None) -> Any:
        value = self.get(key, default)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < float("inf"):
            shown = f"{self.shown}: {self.architecture}.{key}"
            raise UserError(f"{shown} must be a positive {noun}, found {brief(value)}")
        return value


def brief(value: Any) -> str:
    """A value of a file as a sentence can hold it."""
    return "nothing" if value is None else repr(value)[:80]


_BASE = 10_000.0
# Llama 3's scaling as all of its releases have it. A GGUF file has the factors that come of it, and not these.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def rope_parameters(keys: Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of config.json: default, linear, yarn or llama3.

    Raises UserError for scalings that are not run, and factors that are not Llama 3's.
    """
    base = keys.number("rope.freq_base", _BASE)
    rotated = keys.whole("rope.dimension_count", head_dim)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rotated > head_dim or rotated % 2:
        raise UserError(f"{keys.shown}: rope.dimension_count must be even and at most {head_dim}, found {rotated}")
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    kind = keys.get("rope.scaling.type", "none")
    long = [name for name in keys.header.tensors if name.startswith(("rope_factors_long", "rope_factors_short"))]
    if long or kind not in ("none", "linear", "yarn"):
        found = "longrope" if long else kind
        raise UserError(
            f"{keys.shown}: rotary scaling {found!r} is not run from a GGUF file; linear, yarn and Llama 3's are, so"
            " give the original model directory"
        )
    if ROPE_FACTORS in keys.header.tensors:
        return parameters | _llama3(keys, base, rotated)
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    return parameters


def llama3_factors(
    base: float, rotated: int, factor: float, low: float = LOW, high: float = HIGH, original: int = ORIGINAL
) -> NDArray[np.float32]:
    """(rotated / 2,) what Llama 3 divides the frequencies base^(−2i / rotated) by.

    1 for wavelengths below original / high, `factor` for those above original / low, and between them the inverse of a
    mean of 1 and 1 / factor, weighted by where original / wavelength stands between low and high.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    share = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def _llama3(keys: Keys, base: float, rotated: int) -> dict[str, Any]:
    """The parameters whose factors the file has."""
    entry = keys.header.tensors[ROPE_FACTORS]
    if entry.kind != F32 or entry.shape != (rotated // 2,):
        what = f"{entry.kind.name} {list(entry.shape)}"
        raise damaged(keys.shown, f"tensor {ROPE_FACTORS} must hold {rotated // 2} F32 factors, found {what}")
    found = np.fromfile(keys.header.path, "<f4", rotated // 2, offset=entry.start)
    factor = float(found[-1])
    if not 1.0 <= factor < float("inf") or not np.allclose(found, llama3_factors(base, rotated, factor), 1e-4, 0.0):
        raise UserError(
            f"{keys.shown}: the rotary factors of {ROPE_FACTORS} are not Llama 3's, and no others are run from a GGUF"
            " file; give the original model directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Each expert gets names of its own, so a count out of a damaged file must be a sane one.
_MOST_EXPERTS = 1 << 14


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
    layers, heads = keys.whole("block_count"), keys.whole("attention.head_count")
    if layers > len(header.tensors):
        what = f"{keys.architecture}.block_count is {layers}, but there are {len(header.tensors)} tensors"
        raise damaged(keys.shown, what)
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


def _family(keys: Keys, header: Header) -> dict[str, Any]:
    """What only some architectures have."""
    kind = keys.architecture
    if kind == "llama" and keys.get("expert_count") is not None:
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
        window = "attention.sliding_window"
        return {"model_type": "phi3", "sliding_window": None if keys.get(window) is None else keys.whole(window)}
    return {"model_type": kind}


def _experts(keys: Keys, name: str) -> dict[str, Any]:
    count, used = keys.whole("expert_count"), keys.whole("expert_used_count")
    if not used <= count <= _MOST_EXPERTS:
        what = f"{keys.architecture}.expert_used_count {used} and expert_count {count} must rise, to at most"
        raise damaged(keys.shown, f"{what} {_MOST_EXPERTS}")
    return {name: count, "num_experts_per_tok": used}


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
