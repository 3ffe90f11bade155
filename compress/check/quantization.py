"""`quantization_config` against the tensors: bits, groups, zero points, order, and which layers are packed at all."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compress.check.examine import Examined
from compress.check.findings import Finding, Kind, Level
from compress.check.layers import by_weight, is_packed, kind_of, read
from compress.check.opening import Opened
from compress.check.originals import DRAFT, HEADS
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.formats.patterns import trouble

_WHERE = "quantization_config"
# Formats whose readers take packed and plain layers as the tensors say.
_OURS = ("specpress-ternary", "specpress-trellis")
# Layers that libraries never quantise, whatever config.json says.
_NEVER = ("gate", "router", "shared_expert_gate", "embed_tokens", "wte", "wpe")
_LINEAR = re.compile(r"_proj$|^(fc\d?|c_attn|c_fc|c_proj|dense|query_key_value|dense_h_to_4h|dense_4h_to_h|w[123])$")


def _finding(level: Level, kind: Kind, where: str, says: str) -> Finding:
    return Finding(level=level, kind=kind, where=where, says=says)


def check_quantization(opened: Opened, examined: Sequence[Examined]) -> list[Finding]:
    """What config.json says of packed weights, and what they are."""
    weights = by_weight(opened.tensors)
    packed = [name for name, stored in weights.items() if is_packed(stored)]
    config = opened.quantization
    if opened.header is not None or opened.unread is not None:
        return []
    if config is None:
        if not packed:
            return []
        says = (
            f"config.json has none, and {len(packed)} layers are packed ({packed[0]}): their codes are read as weights"
        )
        return [_finding("broken", "quantization", _WHERE, says)]
    if not packed and config.get("config_groups", True):
        return [_finding("broken", "quantization", _WHERE, "is there, and no layer is packed")]
    findings = list(_coverage(config, examined, packed))
    check = _CHECKS.get(opened.form)
    if check is not None:
        findings += check(config, opened, packed)
    return findings


def ignored(config: Mapping[str, Any], layer: str) -> bool:
    """Whether config.json says that a layer is left as it is."""
    lists = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
    named = [entry for key in lists for entry in config.get(key) or [] if isinstance(entry, str)]
    if any(_names(entry, layer, config) for entry in named):
        return True
    dynamic = config.get("dynamic")
    rules = list(dynamic) if isinstance(dynamic, dict) else []
    return any(rule.startswith("-:") and _matches(rule[2:], layer) for rule in rules)


def _names(entry: str, layer: str, config: Mapping[str, Any]) -> bool:
    if entry.startswith("re:"):
        return _matches(entry[3:], layer)
    if config.get("quant_method") == "compressed-tensors":
        return entry == layer or layer.endswith(f".{entry}")
    return entry == layer or f".{entry}." in f".{layer}."


def _matches(expression: str, layer: str) -> bool:
    return trouble(expression) is None and re.match(expression, layer) is not None


def _targeted(config: Mapping[str, Any], layer: str) -> bool:
    """Whether a group of compressed-tensors is for the layer."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return True
    targets = [target for group in groups.values() for target in group.get("targets") or []]
    return any(
        target in ("Linear", layer) or (target.startswith("re:") and _matches(target[3:], layer)) for target in targets
    )


def _coverage(config: Mapping[str, Any], examined: Sequence[Examined], packed: Sequence[str]) -> Iterator[Finding]:
    """Plain layers that should be packed, and packed ones that should not."""
    for name in packed:
        layer = name.removesuffix(".weight")
        if ignored(config, layer) or not _targeted(config, layer):
            says = "config.json leaves this layer as it is, and it is packed: loaders do not find its weight"
            yield _finding("broken", "quantization", name, says)
    kinds = {kind_of(name) for name in packed}
    allowed = config.get("modules_in_block_to_quantize")
    chosen = {name for group in allowed for name in group} if isinstance(allowed, list) and allowed else None
    for one in examined:
        weight = one.weight
        layer = weight.name.removesuffix(".weight")
        linear = len(weight.shape) == 2 and weight.name.endswith(".weight") and _LINEAR.search(weight.kind)
        if weight.packed or not linear or weight.name in HEADS or weight.kind in _NEVER:
            continue
        if ignored(config, layer) or not _targeted(config, layer):
            continue
        if chosen is not None and not any(layer.endswith(f".{name}") for name in chosen):
            continue
        if DRAFT.search(weight.name) or config.get("quant_method") in _OURS:
            continue
        why = "its siblings in other blocks are packed" if weight.kind in kinds else "config.json does not except it"
        says = f"is stored plain ({weight.stored}), and {why}: loaders expect packed codes"
        yield _finding("broken", "quantization", weight.name, says)


def _read_all(opened: Opened, packed: Sequence[str], most: int = 64) -> Iterator[tuple[str, PackedWeight]]:
    """Some of the packed layers, from all over the model."""
    step = max(1, len(packed) // most)
    for name in packed[::step]:
        try:
            weight = read(opened, name)
        except UserError:
            continue  # examine tells it
        if isinstance(weight, PackedWeight):
            yield name, weight


def _gptq(config: Mapping[str, Any], opened: Opened, packed: Sequence[str]) -> list[Finding]:
    findings = []
    ordered, zeros, shifts = [], [], []
    for name, weight in _read_all(opened, packed):
        if weight.perm is not None:
            ordered.append(name)
        if weight.offset is not None:
            zeros.append(name)
            steps = weight.offset / weight.scale
            if bool((steps.round() == steps.flatten()[0].round()).all()):
                shifts.append((name, round(float(steps.flatten()[0]))))
    if ordered and config.get("desc_act") is False:
        says = f"desc_act is false, and {ordered[0]} has its inputs in another order (g_idx): engines that trust the"
        findings.append(_finding("broken", "quantization", f"{_WHERE}.desc_act", says + " flag take the wrong groups"))
    if not ordered and config.get("desc_act") is True and not config.get("static_groups") and _has_groups(config):
        says = "desc_act is true, and no layer's g_idx has an order: it was lost, or never made"
        findings.append(_finding("suspicious", "order", f"{_WHERE}.desc_act", says))
    if config.get("sym") is True and shifts and len(shifts) == len(zeros):
        shift = shifts[0][1]
        way = "high" if shift > 0 else "low"
        says = f"sym is true, and all zero points are {abs(shift)} too {way} for that: {shifts[0][0]}"
        other = "gptq_v2" if shift > 0 else "gptq"
        findings.append(
            _finding("broken", "zero points", f"{_WHERE}.checkpoint_format", f"{says} (as if written as {other})")
        )
    elif config.get("sym") is True and zeros:
        says = f"sym is true, and {zeros[0]} has zero points: kernels for symmetric weights pass them by"
        findings.append(_finding("broken", "quantization", f"{_WHERE}.sym", says))
    return findings


def _has_groups(config: Mapping[str, Any]) -> bool:
    return config.get("group_size") not in (-1, None)


def _awq(config: Mapping[str, Any], opened: Opened, packed: Sequence[str]) -> list[Finding]:
    with_zeros = [name for name, weight in _read_all(opened, packed) if weight.offset is not None]
    if config.get("zero_point") is False and with_zeros:
        says = f"zero_point is false, and {with_zeros[0]} has zero points: engines that trust the flag pass them by"
        return [_finding("broken", "quantization", f"{_WHERE}.zero_point", says)]
    return []


def _compressed_tensors(config: Mapping[str, Any], opened: Opened, packed: Sequence[str]) -> list[Finding]:
    groups = [g["weights"] for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    allowed = {
        (w.get("num_bits"), 0 if w.get("strategy", "tensor") in ("channel", "tensor") else w.get("group_size"))
        for w in groups
    }
    findings = []
    for name, weight in _read_all(opened, packed):
        scheme = weight.scheme
        size = 0 if scheme.group_size in (0, weight.shape[1]) else scheme.group_size
        whole_rows = {(bits, 0 if group == weight.shape[1] else group) for bits, group in allowed}
        if (scheme.bits, size) not in whole_rows:
            said = " or ".join(
                f"{bits} bits in groups of {group}" if group else f"{bits} bits by rows"
                for bits, group in sorted(allowed, key=str)
            )
            found = f"{scheme.bits} bits in groups of {size}" if size else f"{scheme.bits} bits by rows"
            findings.append(_finding("broken", "quantization", name, f"is {found}, and config.json says {said}"))
    return findings


def _bitsandbytes(config: Mapping[str, Any], opened: Opened, packed: Sequence[str]) -> list[Finding]:
    weights = by_weight(opened.tensors)
    four = {name: weights[name] for name in packed if any(".quant_state." in part for part in weights[name])}
    eight = [name for name in packed if name not in four]
    says_four = bool(config.get("load_in_4bit") or config.get("_load_in_4bit"))
    wrong = eight if says_four else list(four)
    findings = []
    if wrong:
        says = f"says {4 if says_four else 8} bits, and {wrong[0]} is stored in {8 if says_four else 4}"
        findings.append(_finding("broken", "quantization", _WHERE, says))
    nested = [name for name, parts in four.items() if any(part.endswith(".nested_absmax") for part in parts)]
    double = config.get("bnb_4bit_use_double_quant")
    if four and double is not None and bool(double) != bool(nested):
        says = f"bnb_4bit_use_double_quant is {str(double).lower()}, and {len(nested)} of {len(four)} layers are so"
        findings.append(_finding("suspicious", "quantization", _WHERE, says))
    return findings


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], Opened, Sequence[str]], list[Finding]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}
