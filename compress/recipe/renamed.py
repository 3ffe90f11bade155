"""Keys of recipes under the names that the last version had: read for one more version, each with a note.

`RENAMED` is all there is to it: a file's mapping is rewritten before it is merged and validated, so that no other code
knows an old name.
"""

from collections.abc import Callable
from typing import Any

_TRAINING = {
    "rate": "learning_rate",
    "floor": "min_lr_ratio",
    "clip": "max_grad_norm",
    "accumulate": "gradient_accumulation_steps",
}
_LOSSES = {"kl": "loss.forward_kl", "cross_entropy": "loss.cross_entropy", "hidden": "loss.hidden_states"}
_ROUNDED = {"checkpointing": "gradient_checkpointing", **_LOSSES}
# Mapping within a stage → old key → new key; after a dot stands a key of the mapping before it.
RENAMED: dict[str, dict[str, str]] = {
    "quantize": {"order": "act_order"},
    "quantize.experts": {"few": "expert_fallback", "least": "min_tokens"},
    "heal": _LOSSES,
    "draft": {"student": "on_policy_fraction"},
    "medusa": {"passes": "max_epochs"},
    "ternary": _ROUNDED,
    "qat": _ROUNDED,
    **{f"{kind}.training": _TRAINING for kind in ("heal", "ternary", "qat", "draft", "medusa")},
}


def with_new_names(data: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """A recipe file's mapping with new keys for old ones; `note` is told each.

    Raises ValueError where a key stands there under both names.
    """
    stages = data.get("stages")
    if not isinstance(stages, list):
        return data
    return {**data, "stages": [_renamed(stage, "", f"stages.{number}", note) for number, stage in enumerate(stages)]}


def _renamed(value: Any, place: str, shown: str, note: Callable[[str], None]) -> Any:
    """The value, a stage's mapping at `place` (a key of RENAMED), which people are told is at `shown`."""
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, inner in value.items():
        new = RENAMED.get(place, {}).get(key)
        found = _renamed(inner, f"{place}.{key}".lstrip("."), f"{shown}.{key}", note)
        if new is None:
            out[key] = found
            continue
        name, _, within = new.partition(".")
        if name in value:
            raise ValueError(f"{shown}.{key}: expected {new} alone, its new name, found both: remove {key}")
        note(f"{shown}.{key} is called {new} now: the old name is read for one more version")
        if within:
            # The divergence counted 1 where an old recipe did not say otherwise.
            out.setdefault(name, {} if "kl" in value else {"forward_kl": 1.0})[within] = found
        else:
            out[name] = found
    return out
