"""Which tensor of a checkpoint becomes what: decided before any work, from names and shapes alone."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from compress.errors import UserError
from compress.recipe import GROUP_SIZES, NF4_BLOCK, Quantize
from compress.report.facts import LeftAlone
from compress.survey import Parameter, Survey

_EXPERT = re.compile(r"\.experts\.\d+\.[A-Za-z0-9_]+\.weight$")
_BLOCK_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Layer:
    """A linear layer to quantise.

    tensor      the weight's name in the checkpoint; its outputs keep the same prefix.
    module      what transformers calls the layer.
    group_size  inputs that share a scale; 0: one scale per output row.
    transposed  whether the checkpoint holds (inputs, outputs): a Conv1D.
    """

    tensor: str
    module: str
    scheme: str
    group_size: int
    transposed: bool = False

    @property
    def prefix(self) -> str:
        """The layer's name in the checkpoint."""
        return self.tensor.removesuffix(".weight")


@dataclass(frozen=True)
class Plan:
    """Everything that a run does to a checkpoint's tensors.

    layers      by tensor name.
    left_alone  what stays and why, one entry per kind of tensor.
    skipped     linear layers that stay, as transformers calls them: quantised loaders must be told.
    parts       (name, tensor names): the units of loading, writing and resuming, in order.
    """

    layers: dict[str, Layer]
    left_alone: tuple[LeftAlone, ...]
    skipped: tuple[str, ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass
class _Draft:
    layers: dict[str, Layer] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def make_plan(shapes: Mapping[str, tuple[int, ...]], model: Survey, stage: Quantize) -> Plan:
    """Decides for every tensor of the checkpoint (`shapes`, by name).

    Raises UserError where a parameter of the model has no tensor, one has the wrong shape, a pattern of the recipe
    matches no layer, the head is to be quantised but is tied to the embedding, or nothing at all is left to quantise.
    """
    missing = model.missing(list(shapes))
    if missing is not None:
        raise UserError(f"tensor {missing} is missing: expected the weights of the whole model; restore the file")
    if stage.head == "int8" and model.tied:
        raise UserError(
            "stages.0.quantize.head: int8 needs an output head of its own, but this model's is tied to its embedding: "
            "set head: keep"
        )
    draft = _Draft()
    expert_group = _expert_group(shapes, stage)
    matched: set[str] = set()
    for name in sorted(shapes):
        parameter = model.find(name)
        if parameter is not None and parameter.kind != "experts" and parameter.shape != tuple(shapes[name]):
            raise UserError(
                f"tensor {name}: expected shape {parameter.shape} as config.json says, found {tuple(shapes[name])}: "
                "the two do not belong together"
            )
        _decide(name, shapes[name], parameter, model, stage, expert_group, matched, draft)
    for pattern in (*stage.targets, *stage.ignore):
        if pattern not in matched:
            example = next((layer.module for layer in draft.layers.values()), "none")
            raise UserError(
                f"recipe pattern {pattern!r} matches no linear layer of the model (one of them is {example}): correct it"
            )
    if not draft.layers:
        why = "; ".join(sorted({why for _, why in draft.left})[:3])
        raise UserError(f"no layer of this model can be quantised as {stage.scheme} ({why}): choose another recipe")
    _check_tied_to_layers(model, draft)
    return Plan(draft.layers, _grouped(draft.left), tuple(draft.skipped), _parts(draft.kept, model))


def _decide(
    name: str,
    shape: tuple[int, ...],
    parameter: Parameter | None,
    model: Survey,
    stage: Quantize,
    expert_group: int | str,
    matched: set[str],
    draft: _Draft,
) -> None:
    if model.is_tied(name):
        draft.left.append((name, "tied to the embedding: stored once"))
        return
    draft.kept.append(name)
    is_expert = parameter is None and _EXPERT.search(name) is not None and len(shape) == 2
    is_layer = parameter is not None and parameter.kind in ("linear", "conv1d", "head")
    if not (is_layer or is_expert):
        draft.left.append((name, _reason(parameter)))
        return
    module = (parameter.name if parameter else name).removesuffix(".weight")
    transposed = parameter is not None and parameter.kind == "conv1d"
    found = _layer(name, module, shape, transposed, parameter, model, stage, expert_group, matched)
    if isinstance(found, Layer):
        draft.layers[name] = found
        return
    draft.left.append((name, found))
    if parameter is not None:
        draft.skipped.append(module)


def _layer(
    name: str,
    module: str,
    shape: tuple[int, ...],
    transposed: bool,
    parameter: Parameter | None,
    model: Survey,
    stage: Quantize,
    expert_group: int | str,
    matched: set[str],
) -> Layer | str:
    """The layer to make of a linear weight, or why it stays."""
    inputs = shape[0] if transposed else shape[1]
    if parameter is not None and parameter.kind == "head":
        if stage.head == "keep":
            return "output head: the recipe says head: keep"
        return Layer(name, module, stage.scheme, 0)
    if model.block(name) is None:
        return "a linear layer outside the blocks"
    ignoring = {p for p in stage.ignore if re.search(p, module)}
    targeting = {p for p in stage.targets if re.search(p, module)}
    matched |= ignoring | targeting
    if ignoring:
        return f"the recipe ignores {min(ignoring)!r}"
    if not targeting:
        return "not among the recipe's targets"
    if parameter is None:
        return Layer(name, module, stage.scheme, expert_group) if isinstance(expert_group, int) else expert_group
    if transposed and stage.scheme != "nf4":
        return "a Conv1D, which compressed-tensors cannot hold: nf4 can"
    group = _group(inputs, stage)
    return Layer(name, module, stage.scheme, group, transposed) if isinstance(group, int) else group


def _group(inputs: int, stage: Quantize) -> int | str:
    """The group size for rows of `inputs` weights, or why there is none."""
    if stage.scheme == "int8-dynamic":
        return 0
    if stage.scheme == "nf4":
        return NF4_BLOCK if inputs % NF4_BLOCK == 0 else f"rows of {inputs} weights are no multiple of {NF4_BLOCK}"
    wanted = stage.group_size or GROUP_SIZES[0]
    sizes = [size for size in GROUP_SIZES if size <= wanted]
    fitting = next((size for size in sizes if inputs % size == 0), None)
    return fitting or f"rows of {inputs} weights are no multiple of {' or '.join(map(str, sizes))}"


def _expert_group(shapes: Mapping[str, tuple[int, ...]], stage: Quantize) -> int | str:
    """The one group size of all experts, or why they stay.

    transformers fuses experts on loading. It dequantises symmetric `weight_packed` on the way there, with one scheme
    for all experts; bitsandbytes' and int8 tensors it does not.
    """
    if stage.scheme == "nf4":
        return "an expert: bitsandbytes leaves fused experts alone"
    if stage.scheme == "int8-dynamic":
        return "an expert: compressed-tensors takes fused experts only as 4-bit weight_packed"
    inputs = {shape[1] for name, shape in shapes.items() if _EXPERT.search(name) and len(shape) == 2}
    groups = {row: _group(row, stage) for row in inputs}
    sizes = {group for group in groups.values() if isinstance(group, int)}
    if len(sizes) < len(set(groups.values())) or not sizes:
        return next((group for group in groups.values() if isinstance(group, str)), "")
    return min(sizes)


def _reason(parameter: Parameter | None) -> str:
    if parameter is None:
        return "no parameter of a linear layer in the model that transformers builds"
    return {
        "embedding": "an embedding",
        "norm": "a norm",
        "router": "a router: small, and it decides for whole experts",
        "bias": "a bias",
        "experts": "experts fused in three dimensions, which neither loader's format holds",
    }.get(parameter.kind, "no linear layer")


def _check_tied_to_layers(model: Survey, draft: _Draft) -> None:
    shared = {layer.tensor for layer in draft.layers.values()} & {
        name for name in draft.layers if (p := model.find(name)) and p.name in model.tied.values()
    }
    if shared:
        raise UserError(f"tensor {min(shared)} is shared by several layers: add it to ignore")


def _grouped(left: Iterable[tuple[str, str]]) -> tuple[LeftAlone, ...]:
    """One entry per name with the block's (and the expert's) number starred, with how many there are."""
    counts: dict[tuple[str, str], list[str]] = {}
    for name, why in left:
        counts.setdefault((_BLOCK_NUMBER.sub(".*", name), why), []).append(name)
    return tuple(
        LeftAlone(names[0] if len(names) == 1 else f"{pattern} ({len(names)})", why)
        for (pattern, why), names in counts.items()
    )


def _parts(kept: Iterable[str], model: Survey) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Tensors outside the blocks one by one (an embedding is large), then block by block."""
    blocks: dict[int, list[str]] = {}
    outside: list[str] = []
    for name in kept:
        number = model.block(name)
        outside.append(name) if number is None else blocks.setdefault(number, []).append(name)
    return (
        *((name, (name,)) for name in outside),
        *((f"block {number}", tuple(blocks[number])) for number in sorted(blocks)),
    )
