"""What config.json says in the same words in most families."""

import math
from typing import Any

from runtime.checkpoints.record import Activation, Architecture
from runtime.errors import UserError

Config = dict[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
# The first families' configs say "gelu" and run in the adapter; Gemma's mean the tanh form.
_FIRST = ("silu", "gelu_tanh")


def given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; the default where there is none, or null."""
    found = config.get(key)
    return default if found is None else found


def count(config: Config, key: str) -> int:
    """A positive integer. Raises UserError for anything else."""
    found = config.get(key)
    if not isinstance(found, int) or found < 1:
        raise UserError(f"config.json: {key} must be a positive integer, found {found!r}")
    return found


def number(value: Any, key: str) -> float:
    """A number that is not NaN; transformers writes infinity as a mapping. Raises UserError for anything else."""
    try:
        found = float(value.get("__float__", "nan") if isinstance(value, dict) else value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"config.json: {key} must hold numbers, found {str(value)[:60]}")
    return found


def activation(config: Config, default: str = "silu", key: str = "hidden_act") -> Activation | None:
    """The activation, or None for one that the kernels have not."""
    return _ACTIVATIONS.get(config.get(key) or default)


def llama(config: Config, act: Activation | None, **more: Any) -> Architecture | None:
    """A model of Llama's keys and tensors, and what a family has besides. None without an activation."""
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    hidden, heads, layers, vocab = (count(config, key) for key in keys)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    if act is None:
        return None
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    sets = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in sets:
        share = part.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        # Then a head rotates as a whole, most of it by no angle.
        share = 1.0 if part.get("rope_type") == "proportional" else share
        if (rotated := int(head_dim * share)) < 2 or rotated % 2:
            raise UserError(
                f"config.json: {rotated} of {head_dim} dimensions of a head are rotated, and pairs of them are needed:"
                " head_dim times partial_rotary_factor must be even"
            )
    told: dict[str, Any] = {
        "intermediate": config.get("intermediate_size") or 4 * hidden,
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "windows": (None,) * layers,
    }
    told |= more
    if told["norm_eps"] is None:
        raise UserError("config.json: the epsilon of norms must be a number, found None")
    return Architecture(
        model_type=config["model_type"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        activation=act,
        **told,
    )


def layer_types(config: Config) -> list[str] | None:
    """What each layer is. Raises UserError where config.json does not name all."""
    kinds = config.get("layer_types")
    layers = count(config, "num_hidden_layers")
    if kinds and len(kinds) != layers:
        raise UserError(f"config.json: layer_types must name {layers} layers, found {len(kinds)}")
    return kinds or None


def windows(config: Config, kind: str = "sliding_attention", key: str = "sliding_window") -> tuple[int | None, ...]:
    """The window of each layer; without layer_types of all of them. Raises UserError for one that is no window."""
    layers, window = count(config, "num_hidden_layers"), config.get(key)
    if window is None:
        return (None,) * layers
    if window < 1:
        raise UserError(f"config.json: {key} must be 1 or more where it is used, found {window}")
    kinds = layer_types(config)
    if kinds is None:
        return (window,) * layers
    return tuple(window if found == kind else None for found in kinds)


def rotary_sets(config: Config) -> tuple[str | None, ...]:
    """The set of rotary parameters of each layer, where there is one for each kind of layer."""
    rope = config.get("rope_parameters") or {}
    kinds = layer_types(config)
    if kinds is None or not any(isinstance(part, dict) for part in rope.values()):
        return ()
    return tuple(kind if rope.get(kind) else None for kind in kinds)
