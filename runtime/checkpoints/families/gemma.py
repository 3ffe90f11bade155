"""Gemma 4: layers of two shapes, keys that several layers share, an input for each layer, a mixture beside the MLP."""

from dataclasses import replace
from typing import Any

from runtime.checkpoints.families.common import Config, activation, count, layer_types, llama, rotary_sets, windows
from runtime.checkpoints.families.dense import AROUND
from runtime.checkpoints.record import Architecture, Beside, Experts, HeadShape
from runtime.errors import UserError

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Every sixth layer sees everything where config.json does not say which.
_EVERY = 6
_ROTARY = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4(config: Config) -> Architecture | None:
    """Gemma 4's language model. None for text that is read in both directions, and other overrides by layer."""
    layers, hidden, vocab = (count(config, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    kinds = _kinds(config, layers)
    config = config | {"layer_types": kinds, "rope_parameters": config.get("rope_parameters") or _ROTARY}
    rotations = {(config["rope_parameters"].get(kind) or {}).get("rope_type", "default") for kind in kinds}
    shapes = _shapes(config, kinds)
    own = config.get("hidden_size_per_layer_input", 256) or 0
    if own and config.get("vocab_size_per_layer_input", vocab) != vocab:
        return None
    if config.get("use_bidirectional_attention") == "all" or not rotations <= {"default", "proportional"}:
        return None
    keys_of = _keys_of(config, kinds)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    found = llama(
        config,
        activation(config, "gelu_pytorch_tanh", "hidden_activation"),
        names=replace(AROUND, block_scale="layer_scalar"),
        tied=bool(config.get("tie_word_embeddings", True)),
        max_positions=config.get("max_position_embeddings", 131_072),
        embedding_scale=hidden**0.5,
        attention_scale=1.0,
        final_softcap=config.get("final_logit_softcapping") or 0.0,
        query_key_norm=True,
        value_norm=True,
        keys_as_values=tuple(n for n in range(layers) if config.get("attention_k_eq_v") and kinds[n] == _FULL),
        keys_of=keys_of,
        rotary=rotary_sets(config),
        windows=windows(config),
        layer_input=own,
        experts=_experts(config) if config.get("enable_moe_block") else None,
    )
    if found is None or shapes is None:
        return None
    sizes = tuple(found.intermediate * (wide if keys_of[n] != n else 1) for n in range(layers))
    return replace(found, head_shapes=shapes, intermediates=sizes)


def _kinds(config: Config, layers: int) -> list[str]:
    """What each layer is; the last one always sees everything, as transformers has it."""
    kinds = layer_types(config) or [_SLIDING if (n + 1) % _EVERY else _FULL for n in range(layers)]
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise UserError(f"config.json: layer_types may name {_FULL} and {_SLIDING}, found {sorted(unknown)[0]!r}")
    return [*kinds[:-1], _FULL]


def _shapes(config: Config, kinds: list[str]) -> tuple[HeadShape, ...] | None:
    """Each layer's keys, from what config.json says of each layer, or of those that see everything."""
    heads = count(config, "num_attention_heads")
    said: Any = config.get("per_layer_config")
    if said is None:
        of_full = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
        said = {n: of_full for n, kind in enumerate(kinds) if kind == _FULL}
    common = {"head_dim": 256, "num_key_value_heads": 4} | {
        key: config[key] for key in ("head_dim", "num_key_value_heads") if config.get(key) is not None
    }
    found = []
    for number in range(len(kinds)):
        own = said.get(str(number), said.get(number)) or {}
        if set(own) - set(common):
            return None
        whole = common | own
        shape = HeadShape(count(whole, "num_key_value_heads"), count(whole, "head_dim"))
        if heads % shape.kv_heads or shape.head_dim % 2:
            raise UserError(
                f"config.json: layer {number} has {shape.kv_heads} key/value heads of {shape.head_dim} dimensions, and"
                f" expected are a divisor of {heads} attention heads and an even number"
            )
        found.append(shape)
    return tuple(found)


def _keys_of(config: Config, kinds: list[str]) -> tuple[int, ...]:
    """The last layers read the keys of the last layer of their kind before them."""
    shared = config.get("num_kv_shared_layers") or 0
    first = len(kinds) - shared
    own = kinds[: max(first, 0)]
    if missing := set(kinds) - set(own):
        raise UserError(
            f"config.json: num_kv_shared_layers is {shared}, and no layer of kind {sorted(missing)[0]!r} among the"
            f" other {len(own)} has keys for them"
        )
    last = {kind: max(n for n in range(first) if kinds[n] == kind) for kind in own}
    return tuple(n if n < first else last[kind] for n, kind in enumerate(kinds))


def _experts(config: Config) -> Experts:
    total, chosen = count(config, "num_experts"), count(config, "top_k_experts")
    if chosen > total:
        raise UserError(f"config.json: top_k_experts is {chosen}, and a layer has {total} experts")
    hidden = count(config, "moe_intermediate_size")
    return Experts(total, chosen, hidden, True, names=("",), routers=("router.proj",), beside=Beside())
