"""config.json and generation_config.json beside the original's: keys that change what is computed."""

import json
from collections.abc import Mapping
from typing import Any

from compress.check.findings import Finding, Kind, Level
from compress.check.layers import by_weight
from compress.check.opening import Opened
from compress.check.originals import find_embedding
from runtime.errors import UserError
from runtime.files import read_json

# Sizes that pruning changes on purpose, the weights' shapes being checked against them.
_SIZES = frozenset(
    [
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "intermediate_size",
        "moe_intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "layer_types",
        "max_window_layers",
        "mlp_only_layers",
        "hidden_size",
        "vocab_size",
        "head_dim",
    ]
)
# What changes every result without changing a shape.
_MEANING = frozenset(
    [
        "model_type",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "sliding_window",
        "use_sliding_window",
        "partial_rotary_factor",
        "rotary_pct",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "logit_scale",
        "num_experts_per_tok",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "scoring_func",
        "attention_bias",
        "mlp_bias",
        "use_qk_norm",
        "parallel_residual",
        "use_parallel_residual",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "layer_types",
    ]
)
# What a user of the model notices.
_TOKENS = frozenset(["bos_token_id", "eos_token_id", "pad_token_id"])
_POSITIONS = "max_position_embeddings"


def _finding(level: Level, kind: Kind, where: str, says: str) -> Finding:
    return Finding(level=level, kind=kind, where=where, says=says)


def check_config(opened: Opened, original: Opened | None) -> list[Finding]:
    """Against the weights alone, and against the original."""
    findings = _against_weights(opened)
    if original is None or not opened.config or not original.config:
        return findings
    ours, theirs = _normalised(opened), _normalised(original)
    shapes_differ = any(ours.get(key) != theirs.get(key) for key in ("num_hidden_layers", "hidden_size"))
    for key in sorted(set(ours) & set(theirs)):
        if _same(ours[key], theirs[key]):
            continue
        says = f"is {_shown(ours[key])}, in the original {_shown(theirs[key])}"
        if key in _MEANING and not (key in _SIZES and (shapes_differ or _resized(opened, original))):
            findings.append(_finding("broken", "config", f"config.json: {key}", says))
        elif (key in _TOKENS and opened.header is None and key != "pad_token_id") or key == _POSITIONS:
            findings.append(_finding("suspicious", "config", f"config.json: {key}", says))
        elif key in _SIZES:
            findings.append(_finding("note", "config", f"config.json: {key}", says))
    return [*findings, *_generation(opened, original)]


def _against_weights(opened: Opened) -> list[Finding]:
    """The number of layers and of tokens, which shapes alone do not show."""
    config, weights = opened.text_config, by_weight(opened.tensors)
    findings = []
    embedding, words = find_embedding(weights), config.get("vocab_size")
    if embedding is not None and isinstance(words, int) and opened.header is None:
        stored = weights[embedding]
        rows = opened.tensors.entry(stored[0]).shape[0] if len(stored) == 1 else words
        if rows != words:
            says = f"is {words}, and {embedding} has {rows} rows"
            findings.append(_finding("broken", "config", "config.json: vocab_size", says))
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    keys = config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and heads % max(keys, 1):
        says = f"is {keys}, which does not divide the {heads} heads"
        findings.append(_finding("broken", "config", "config.json: num_key_value_heads", says))
    if isinstance(hidden, int) and isinstance(heads, int) and not config.get("head_dim") and hidden % max(heads, 1):
        says = f"is {heads}, which does not divide hidden_size {hidden}"
        findings.append(_finding("broken", "config", "config.json: num_attention_heads", says))
    return findings


def _resized(opened: Opened, original: Opened) -> bool:
    """Whether the attention of the model has another size than the original's: heads were taken out."""

    def rows(one: Opened) -> tuple[int, ...] | None:
        name = next((n for n in by_weight(one.tensors) if n.endswith("0.self_attn.o_proj.weight")), None)
        if name is None:
            return None
        entries = [one.tensors.entry(part) for part in by_weight(one.tensors)[name]]
        return tuple(size for entry in entries for size in entry.shape)

    ours, theirs = rows(opened), rows(original)
    return opened.quantization is None and ours is not None and ours != theirs


def _normalised(opened: Opened) -> dict[str, Any]:
    """The configuration with transformers' defaults, and its own words for what older files say otherwise."""
    from transformers import AutoConfig

    try:
        if opened.header is not None:
            return dict(opened.text_config)
        config = AutoConfig.from_pretrained(opened.path, trust_remote_code=False)
        return dict(config.get_text_config(decoder=True).to_dict())
    except Exception:  # a library on somebody else's file; check_names tells it
        return dict(opened.text_config)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_same(one[key], other[key]) for key in set(one) & set(other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    if one is None or other is None:
        return True
    as_list = [value if isinstance(value, list) else [value] for value in (one, other)]
    return bool(as_list[0] == as_list[1])


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _generation(opened: Opened, original: Opened) -> list[Finding]:
    """What ends a text."""
    said = []
    for one in (opened, original):
        file = one.path / "generation_config.json"
        try:
            said.append(read_json(file) if file.is_file() else {})
        except UserError as error:
            return [_finding("broken", "config", "generation_config.json", str(error))]
    ours, theirs = (found.get("eos_token_id") for found in said)
    if ours is not None and theirs is not None and not _same(ours, theirs):
        says = f"is {_shown(ours)}, in the original {_shown(theirs)}: texts end elsewhere"
        return [_finding("suspicious", "config", "generation_config.json: eos_token_id", says)]
    return []
