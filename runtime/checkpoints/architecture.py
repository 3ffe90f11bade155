"""Which models the decoder runs, described as data: one frozen record per checkpoint, from its config.json."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from runtime.checkpoints.directory import Checkpoint
from runtime.errors import UserError, fault_of

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


# The Llama family: one block structure, small differences. Everything else goes through hf_adapter.py.
FAMILY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    hidden: int
    renormalize: bool
    # Where the block keeps it: "block_sparse_moe" in old Mixtral files, "mlp" since transformers 5.
    names: tuple[str, ...] = ("mlp", "block_sparse_moe")


@dataclass(frozen=True)
class Architecture:
    """What the decoder needs to know of a checkpoint."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    activation: Literal["silu", "gelu_tanh"]
    # Norm weights are stored minus this (Gemma: 1), and embeddings are multiplied by that (Gemma: sqrt(hidden)).
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_key_norm: bool = False
    fused: bool = False
    # Sliding window in tokens per layer; None: the layer sees everything.
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None
    # Layers whose MLP is dense although the model has experts.
    dense_layers: tuple[int, ...] = ()


_SILU, _GELU_TANH = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def describe(config: dict[str, Any]) -> Architecture | None:
    """The architecture of a config.json, or None where the decoder does not know the family.

    Raises UserError where the family is known and a key it needs is missing or has a value that cannot be run.
    """
    kind = config.get("model_type")
    if kind not in FAMILY:
        return None
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    hidden, heads, layers, vocab = (_count(config, key) for key in keys)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    gemma = kind == "gemma"
    # Gemma's first configs say "gelu" in hidden_act and mean the tanh form.
    act = config.get("hidden_activation") or ("gelu_pytorch_tanh" if gemma else config.get("hidden_act", "silu"))
    if act not in _SILU + _GELU_TANH:
        return None
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if (rotated := int(head_dim * share)) < 2 or rotated % 2:
        raise UserError(
            f"config.json: {rotated} of {head_dim} dimensions of a head are rotated, and pairs of them are needed:"
            " head_dim times partial_rotary_factor must be even"
        )
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step) if kind == "qwen3_moe" else ()
    return Architecture(
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.get("intermediate_size") or 4 * hidden,
        vocab=vocab,
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", gemma)),
        activation="silu" if act in _SILU else "gelu_tanh",
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_key_norm=kind in ("qwen3", "qwen3_moe"),
        fused=kind == "phi3",
        windows=_windows(config, layers),
        experts=_experts(config, kind),
        dense_layers=dense,
    )


def _count(config: dict[str, Any], key: str) -> int:
    found = config.get(key)
    if not isinstance(found, int) or found < 1:
        raise UserError(f"config.json: {key} must be a positive integer, found {found!r}")
    return found


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if config["model_type"] in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        window = None
    if window is None:
        return (None,) * layers
    if window < 1:
        raise UserError(f"config.json: sliding_window must be 1 or more where it is used, found {window}")
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise UserError(f"config.json: layer_types must name {layers} layers, found {len(kinds)}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 0) if config["model_type"].startswith("qwen") else 0
    return tuple(window if i >= first else None for i in range(layers))


def _experts(config: dict[str, Any], kind: str) -> Experts | None:
    if kind not in ("mixtral", "qwen3_moe"):
        return None
    # qwen3_moe's is written under the one name by older releases of transformers, under the other by newer ones.
    local = kind == "mixtral" or "num_local_experts" in config
    count = _count(config, "num_local_experts" if local else "num_experts")
    hidden = _count(config, "intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
    if (per_token := _count(config, "num_experts_per_tok")) > count:
        raise UserError(f"config.json: num_experts_per_tok is {per_token}, and a layer has {count} experts")
    renormalize = kind == "mixtral" or bool(config.get("norm_topk_prob", False))
    return Experts(count, per_token, hidden, renormalize)
