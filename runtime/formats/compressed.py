"""compressed-tensors: the `quantization_config` that goes into config.json, and reading layers by it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import UserError
from runtime.formats import int4, int8
from runtime.formats.packed import Activation, PackedWeight, Scheme
from runtime.formats.tensors import Tensors
from runtime.formats.words import stored_bits

_WHERE = "config.json: quantization_config"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = r"re:.*\.experts\..*"
# A format of compressed-tensors and what it holds.
Kind = tuple[str, Scheme]


def hf_config(layers: Mapping[str, Scheme], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration of a model whose linear modules `layers` are packed with these int8 and int4 schemes.

    A group whose modules are all that are packed targets "Linear"; `ignore` names the linear modules that stay. Of
    several groups each lists its modules, by regular expression over the layer numbers where all layers of one name
    agree. Experts form one group, because transformers fuses them with a single scheme.
    Raises ValueError for other schemes, no layers, or experts that differ.
    """
    if not layers:
        raise ValueError("no layer is packed, so there is nothing to configure")
    kinds = {name: (_format(name, scheme), scheme) for name, scheme in layers.items()}
    experts = {kind for name, kind in kinds.items() if int8.is_expert(name)}
    if len(experts) > 1:
        raise ValueError("all experts need one scheme and group size, because transformers fuses them as one")
    counted = sorted(Counter(kinds.values()).items(), key=lambda item: (-item[1], repr(item[0])))
    mixed = len({form for (form, _), _ in counted}) > 1
    groups: dict[str, Any] = {}
    for number, (kind, _) in enumerate(counted):
        group = _group(kind[1])
        group["targets"] = ["Linear"] if len(counted) == 1 else _targets(kinds, kind, ignore)
        if mixed:
            group["format"] = kind[0]
        groups[f"group_{number}"] = group
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else counted[0][0][0],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(name: str, scheme: Scheme) -> str:
    if scheme.symmetric and scheme.kind == "int8" and scheme.group_size == 0:
        return "pack-quantized" if int8.is_expert(name) else "int-quantized"
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


def _targets(kinds: Mapping[str, Kind], kind: Kind, ignore: Sequence[str]) -> list[str]:
    """Names of one kind's modules; a name that is of this kind at every layer number becomes one expression."""
    others = {_NUMBER.sub("#", name) for name, found in kinds.items() if found != kind}
    others |= {_NUMBER.sub("#", name) for name in ignore}
    targets: dict[str, None] = {}
    for name, found in kinds.items():
        if found != kind:
            continue
        shape = _NUMBER.sub("#", name)
        expression = r"\d+".join(re.escape(part) for part in shape.split("#"))
        target = name if shape in others or "#" not in shape else f"re:^{expression}$"
        # On disk experts have numbers and in the model they have none: this names both.
        targets[_EXPERTS if int8.is_expert(name) else target] = None
    return list(targets)


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or that names something not read yet."""
    groups = config.get("config_groups")
    # A cache's scheme alone is a configuration too: of plain weights.
    if not isinstance(groups, dict) or not (groups or config.get("kv_cache_scheme")):
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
        bits = (8,) if form == "int-quantized" else (4, 8)
        found = (weights.get("type", "int"), weights.get("num_bits"), weights.get("symmetric", True))
        if found[0] != "int" or found[1] not in bits or found[2] is not True:
            raise UserError(
                f"{where}.weights: {form} is read with symmetric integers of {' or '.join(map(str, bits))} bits, found"
                f" type {found[0]!r}, num_bits {found[1]!r}, symmetric {found[2]!r}"
            )
        _activation(group, where)
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


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """The layer `prefix`, or None where it is stored plain; 4-bit codes stay two a byte unless `unpack`.

    The tensors themselves say which group a layer is of, so no expression out of a file is ever run. `config` has
    passed `check`. Raises UserError for damaged tensors, or where no group or several different ones fit.
    """
    if f"{prefix}.weight_packed" in tensors:
        form = "pack-quantized"
        allowed = {int(group["weights"]["num_bits"]) for group in _groups(config, form)}
        if (bits := stored_bits(tensors, prefix, sorted(allowed))) == 4:
            return int4.from_tensors(tensors, prefix, unpack)
    elif f"{prefix}.weight_scale" in tensors:
        form, bits = "int-quantized", 8
    else:
        return None
    kinds = {_activation(g, form) for g in _groups(config, form) if g["weights"]["num_bits"] == bits}
    static = f"{prefix}.input_scale" in tensors
    fitting: set[Activation] = {kind for kind in kinds if (kind == "int8-tensor") == static}
    if len(fitting) != 1:
        raise UserError(
            f"tensor {prefix}.weight_scale: one kind of int8 input must fit it ({'with' if static else 'without'} an"
            f" input_scale), but the groups of config.json have: {', '.join(sorted(kinds)) or 'none'}"
        )
    return int8.from_tensors(tensors, prefix, fitting.pop())


def _groups(config: Mapping[str, Any], form: str) -> list[dict[str, Any]]:
    found = config["config_groups"].values()
    return [group for group in found if (group.get("format") or config.get("format")) == form]
