"""compressed-tensors: the `quantization_config` that goes into config.json, and reading layers by it."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from runtime.errors import UserError
from runtime.formats import fp8, int8
from runtime.formats.codes import stored_bits
from runtime.formats.configuration import WHERE
from runtime.formats.packed import Activation, PackedWeight, Scheme
from runtime.formats.patterns import trouble
from runtime.formats.schemes import KINDS, SCHEMES, CodeKind
from runtime.formats.tensors import Tensors

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = r"re:.*\.experts\..*"
# The bits that each layout is read with, and the kind of such codes.
_KINDS: dict[str, dict[int, CodeKind]] = {"pack-quantized": {}, "int-quantized": {}, "float-quantized": {}}
for _row in SCHEMES.values():
    if _row.codes.library == "compressed-tensors":
        for _layout in filter(None, (_row.codes.layout, _row.codes.expert_layout)):
            _KINDS[_layout][_row.bits] = _row.codes
# Words for activation order: the first two say that `weight_g_idx` has it, the others that it left no trace.
_GROUP_ORDER: tuple[Any, ...] = ("group", "dynamic", True)
_ORDERS: tuple[Any, ...] = (*_GROUP_ORDER, "weight", "static", False, None)
# A format of compressed-tensors, what it holds, and whether inputs are in activation order.
Kind = tuple[str, Scheme, bool]


def hf_config(
    layers: Mapping[str, Scheme], ignore: Sequence[str] = (), reordered: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration of a model whose linear modules `layers` are packed with these fp8, int8 and int4 schemes.

    A group whose modules are all that are packed targets "Linear"; `ignore` names the linear modules that stay. Of
    several groups each lists its modules, by regular expression over the layer numbers where all layers of one name
    agree. Experts form one group, because transformers fuses them with a single scheme.

    `reordered` names the modules that have a `weight_g_idx`. compressed-tensors took that out in August 2026, and
    refuses the whole model since: store weights in input order where transformers is to load them. With zero points
    transformers (5.23, with compressed-tensors 0.20) loads only models of one scheme, and only when it is told
    `CompressedTensorsConfig(dequantize=True)`: else it expects `weight_zero_point` in a shape that nobody writes.

    Raises ValueError for other schemes, no layers, and experts that differ or that transformers cannot fuse.
    """
    if not layers:
        raise ValueError("no layer is packed, so there is nothing to configure")
    kinds = {name: (_format(name, scheme), scheme, name in reordered) for name, scheme in layers.items()}
    experts = {kind for name, kind in kinds.items() if int8.is_expert(name)}
    if len(experts) > 1:
        raise ValueError("all experts need one scheme and group size, because transformers fuses them as one")
    for _, scheme, order in experts:
        if order or not scheme.symmetric or scheme.activation == "int8-tensor":
            raise ValueError(
                "transformers fuses experts that are symmetric, in input order and without static inputs, found"
                f" {scheme}{', reordered' if order else ''}"
            )
    counted = sorted(Counter(kinds.values()).items(), key=lambda item: (-item[1], repr(item[0])))
    mixed = len({form for (form, *_), _ in counted}) > 1
    groups: dict[str, Any] = {}
    for number, (kind, _) in enumerate(counted):
        group = _group(kind[1], kind[2])
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
    kind = KINDS[scheme.kind]
    form = kind.expert_layout if int8.is_expert(name) else kind.layout
    # What has a layout of its own for linear layers has one scale per row in both.
    rows = kind.layout == "pack-quantized" or (scheme.symmetric and scheme.group_size == 0)
    if not form or not rows or (kind.is_float and scheme.activation != "float"):
        raise ValueError(
            "compressed-tensors is written for symmetric int8 rows, int6 to int2, and fp8 rows that are no experts,"
            f" found {scheme}"
        )
    return form


def _group(scheme: Scheme, reordered: bool) -> dict[str, Any]:
    kind = "float" if KINDS[scheme.kind].is_float else "int"
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": kind, "symmetric": scheme.symmetric, "dynamic": False}
    if reordered:
        weights["actorder"] = "group"
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
        # transformers takes the first group with an expression that says "experts" for that of all experts: layers that
        # only sound like them (shared_experts) go by their names.
        alone = shape in others or "#" not in shape or ("experts" in name and not int8.is_expert(name))
        target = name if alone else f"re:^{expression}$"
        # On disk experts have numbers and in the model they have none: this names both.
        targets[_EXPERTS if int8.is_expert(name) else target] = None
    return list(targets)


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or that names something not read yet."""
    groups = config.get("config_groups")
    # A cache's scheme alone is a configuration too: of plain weights.
    if not isinstance(groups, dict) or not (groups or config.get("kv_cache_scheme")):
        raise UserError(f"{WHERE}.config_groups must name at least one group, found {groups!r}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UserError(f"{WHERE}.quantization_status must be 'compressed', found {status!r}; save it compressed")
    for name, group in groups.items():
        where = f"{WHERE}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UserError(f"{where}.weights must be a mapping, found {weights!r}")
        targets = group.get("targets", [])
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise UserError(f"{where}.targets must be a list of names, found {targets!r}")
        form = group.get("format") or config.get("format")
        if not isinstance(form, str) or form not in _KINDS:
            raise UserError(f"{where}: format {form!r} is not read yet; {', '.join(_KINDS)} are")
        if form == "float-quantized":
            _check_floats(group, where)
            continue
        found = (weights.get("type", "int"), weights.get("num_bits"), weights.get("symmetric", True))
        if found[0] != "int" or found[1] not in list(_KINDS[form]) or not isinstance(found[2], bool):
            widths = " or ".join(map(str, sorted(_KINDS[form])))
            raise UserError(
                f"{where}.weights: {form} is read with integers of {widths} bits, found type {found[0]!r},"
                f" num_bits {found[1]!r}, symmetric {found[2]!r}"
            )
        if not isinstance(size := weights.get("group_size"), int | None):
            raise UserError(f"{where}.weights.group_size must be a whole number or null, found {size!r}")
        if (order := weights.get("actorder")) not in _ORDERS:
            raise UserError(f"{where}.weights.actorder must be 'group', 'weight', 'static' or null, found {order!r}")
        _activation(group, where)
    if config.get("sparsity_config") or config.get("transform_config"):
        raise UserError(f"{WHERE}: sparsity_config and transform_config are not read; use a checkpoint without them")


def _check_floats(group: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a float-quantized group that is no E4M3 by rows or tensors, with inputs of any such kind."""
    weights, inputs = group["weights"], group.get("input_activations")
    strategy = weights.get("strategy", "tensor")
    if not _is_fp8(weights) or strategy not in ("channel", "tensor"):
        raise UserError(
            f"{where}.weights: float-quantized is read with symmetric floats of 8 bits by channel or tensor, found type"
            f" {weights.get('type', 'int')!r}, num_bits {weights.get('num_bits')!r}, strategy {strategy!r}, symmetric"
            f" {weights.get('symmetric', True)!r}"
        )
    if inputs is not None and not (isinstance(inputs, dict) and _is_fp8(inputs)):
        raise UserError(f"{where}.input_activations: beside fp8 weights 8-bit floats are read, found {inputs!r}")


def _is_fp8(args: Mapping[str, Any]) -> bool:
    return args.get("type") == "float" and args.get("num_bits") == 8 and args.get("symmetric", True) is True


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

    The tensors themselves say which group a layer is of; only where they fit several are the groups' targets asked.
    `config` has passed `check`. Raises UserError for damaged tensors, or where no group or several different ones fit.
    """
    if f"{prefix}.weight_packed" in tensors:
        form = "pack-quantized"
        groups = _groups(config, form)
        named = {group["weights"]["num_bits"] for group in _targeting(groups, prefix)}
        bits = stored_bits(tensors, prefix, sorted({group["weights"]["num_bits"] for group in groups}), named)
        groups = _fitting(groups, tensors, prefix, bits)
        if bits != 8:
            sizes = {group["weights"].get("group_size") for group in groups}
            per_row = int(tensors[f"{prefix}.weight_shape"][1]) not in sizes
            found: PackedWeight = _KINDS[form][bits].format.from_tensors(
                tensors, prefix, unpack, bits=bits, per_row=per_row
            )
            return found
    elif fp8.holds(tensors, prefix):
        if not _groups(config, "float-quantized"):
            raise UserError(
                f"tensor {prefix}.weight holds float8_e4m3fn, and no group of config.json is float-quantized; the two"
                " do not belong together"
            )
        return fp8.from_tensors(tensors, prefix)
    elif f"{prefix}.weight_scale" in tensors:
        form = "int-quantized"
        groups = _groups(config, form)
    else:
        return None
    kinds = {_activation(group, form) for group in groups}
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


def _targeting(groups: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """The groups that name the layer, by its name or an expression; else those for all linear layers.

    Of expressions only those are run that cannot take long (patterns.py).
    """

    def names(targets: list[Any]) -> bool:
        if prefix in targets:
            return True
        expressions = [one[3:] for one in targets if isinstance(one, str) and one.startswith("re:")]
        return any(trouble(one) is None and re.match(one, prefix) is not None for one in expressions)

    found = [group for group in groups if names(group.get("targets") or [])]
    return found or [group for group in groups if "Linear" in (group.get("targets") or [])]


def _fitting(groups: list[dict[str, Any]], tensors: Tensors, prefix: str, bits: int) -> list[dict[str, Any]]:
    """The groups of `bits` bits that a packed layer can be of, by its zero points and its input order.

    A lost tensor would give other weights and no error, so it is asked for. Raises UserError where none is left.
    """
    groups = [group for group in groups if group["weights"]["num_bits"] == bits]
    asked: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "weight_zero_point": lambda weights: not weights.get("symmetric", True),
        "weight_g_idx": lambda weights: weights.get("actorder") in _GROUP_ORDER,
    }
    for part, asks in asked.items():
        there = f"{prefix}.{part}" in tensors
        if there and part == "weight_g_idx":
            continue  # Older files name no order for it.
        groups = [group for group in groups if asks(group["weights"]) == there]
        if not groups:
            raise UserError(
                f"tensor {prefix}.{part} is {'there' if there else 'missing'}, and every group of {bits} bits in"
                f" config.json is {'without' if there else 'with'} one; the two do not belong together"
            )
    return groups
