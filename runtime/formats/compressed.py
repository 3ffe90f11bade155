"""compressed-tensors: the `quantization_config` that goes into config.json, and reading layers by it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import UserError
from runtime.formats import int4, int8
from runtime.formats.packed import Activation, PackedWeight, Scheme
from runtime.formats.tensors import Tensors

_WHERE = "config.json: quantization_config"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def hf_config(layers: Mapping[str, Scheme], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration of a model whose linear modules `layers` are packed with these int8 and int4 schemes.

    With one scheme its group targets "Linear", and `ignore` names the linear modules that stay. With several, each
    group lists its modules by regular expression over the layer numbers, or one by one where layers of one name differ.
    Raises ValueError for other schemes or no layers.
    """
    if not layers:
        raise ValueError("no layer is packed, so there is nothing to configure")
    schemes = sorted(Counter(layers.values()).items(), key=lambda item: (-item[1], repr(item[0])))
    formats = {_format(scheme) for scheme, _ in schemes}
    groups: dict[str, Any] = {}
    for number, (scheme, _) in enumerate(schemes):
        group = _group(scheme)
        group["targets"] = ["Linear"] if len(schemes) == 1 else _targets(layers, scheme, ignore)
        if len(formats) > 1:
            group["format"] = _format(scheme)
        groups[f"group_{number}"] = group
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(scheme: Scheme) -> str:
    if scheme.symmetric and scheme.kind == "int8" and scheme.group_size == 0:
        return "int-quantized"
    if scheme.symmetric and scheme.kind == "int4":
        return "pack-quantized"
    raise ValueError(f"compressed-tensors is written for symmetric int8 rows and int4 groups, found {scheme}")


def _group(scheme: Scheme) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= (
        {"strategy": "group", "group_size": scheme.group_size}
        if scheme.group_size
        else {"strategy": "channel", "group_size": None}
    )
    inputs: dict[str, Any] | None = None
    if scheme.activation in ("int8-token", "int8-tensor"):
        dynamic = scheme.activation == "int8-token"
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": dynamic}
        inputs["strategy"] = "token" if dynamic else "tensor"
    return {"weights": weights, "input_activations": inputs, "output_activations": None}


def _targets(layers: Mapping[str, Scheme], scheme: Scheme, ignore: Sequence[str]) -> list[str]:
    """Names of one scheme's modules; a name that has this scheme at every layer number becomes one expression."""
    mine = [name for name, found in layers.items() if found == scheme]
    others = {_NUMBER.sub("#", name) for name, found in layers.items() if found != scheme}
    others |= {_NUMBER.sub("#", name) for name in ignore}
    targets: dict[str, None] = {}
    for name in mine:
        shape = _NUMBER.sub("#", name)
        expression = r"\d+".join(re.escape(part) for part in shape.split("#"))
        targets[name if shape in others or "#" not in shape else f"re:^{expression}$"] = None
    return list(targets)


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or that names something not read yet."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UserError(f"{_WHERE}.config_groups must name at least one group, found {groups!r}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UserError(f"{_WHERE}.quantization_status must be 'compressed', found {status!r}; save it compressed")
    for name, group in groups.items():
        where = f"{_WHERE}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UserError(f"{where}.weights must be a mapping, found {weights!r}")
        form = group.get("format") or config.get("format")
        if form not in ("int-quantized", "pack-quantized"):
            raise UserError(f"{where}: format {form!r} is not read yet; int-quantized and pack-quantized are")
        bits = {"int-quantized": 8, "pack-quantized": 4}[form]
        found = (weights.get("type", "int"), weights.get("num_bits"), weights.get("symmetric", True))
        if found != ("int", bits, True):
            raise UserError(
                f"{where}.weights: {form} is read with symmetric {bits}-bit integers, found type {found[0]!r},"
                f" num_bits {found[1]!r}, symmetric {found[2]!r}"
            )
        _activation(group, where)
    if config.get("kv_cache_scheme"):
        raise UserError(f"{_WHERE}.kv_cache_scheme is not read yet; use a checkpoint without one")
    if config.get("sparsity_config") or config.get("transform_config"):
        raise UserError(f"{_WHERE}: sparsity_config and transform_config are not read; use a checkpoint without them")


def _activation(group: Mapping[str, Any], where: str) -> Activation:
    """How the inputs of a group's layers are rounded."""
    inputs = group.get("input_activations")
    if inputs is None:
        return "float"
    if not isinstance(inputs, dict) or (inputs.get("type", "int"), inputs.get("num_bits")) != ("int", 8):
        raise UserError(f"{where}.input_activations: only 8-bit integers are read, found {inputs!r}")
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic", False)
    if inputs.get("symmetric", True) and (strategy, dynamic) == ("token", True):
        return "int8-token"
    if inputs.get("symmetric", True) and (strategy, dynamic) == ("tensor", False):
        return "int8-tensor"
    raise UserError(
        f"{where}.input_activations: symmetric per token (dynamic) or per tensor (static) is read, found strategy"
        f" {strategy!r}, dynamic {dynamic!r}, symmetric {inputs.get('symmetric', True)!r}"
    )


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str) -> PackedWeight | None:
    """The layer `prefix`, or None where it is stored plain.

    The tensors themselves say which group a layer is of, so no expression out of a file is ever run. `config` has
    passed `check`. Raises UserError for damaged tensors, or where no group or several different ones fit.
    """
    if f"{prefix}.weight_packed" in tensors:
        return int4.from_tensors(tensors, prefix)
    if f"{prefix}.weight_scale" not in tensors:
        return None
    name = f"{prefix}.weight"
    form = config.get("format")
    kinds = {
        _activation(group, key)
        for key, group in config["config_groups"].items()
        if (group.get("format") or form) == "int-quantized"
    }
    static = f"{prefix}.input_scale" in tensors
    fitting: set[Activation] = {kind for kind in kinds if (kind == "int8-tensor") == static}
    if len(fitting) != 1:
        found = ", ".join(sorted(kinds)) or "none"
        raise UserError(
            f"tensor {name}: one kind of int8 input must fit it ({'static' if static else 'no'} input_scale), but the"
            f" groups of config.json have: {found}"
        )
    return int8.from_tensors(tensors, prefix, fitting.pop())
