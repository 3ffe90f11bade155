"""Which tensor of a checkpoint becomes what: decided before any work, from names and shapes alone."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from compress.errors import UserError
from compress.model.loaders import check_apart, refusal
from compress.model.structure import ModelStructure, Parameter
from compress.recipe.block_stages import Quantize
from compress.records import LeftAlone
from runtime.formats.schemes import SCHEMES, CodeKind

# Outputs of a ternary layer come in fours: that many share a byte.
_EXPERT = re.compile(r"\.experts\.\d+\.[A-Za-z0-9_]+\.weight$")
_CHANGED = "changed by another stage"
_BLOCK_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Layer:
    """A linear layer to quantise.

    tensor      the weight's name in the checkpoint; its outputs keep the same prefix.
    module      what transformers calls the layer.
    group_size  inputs that share a scale; 0: one scale per output row.
    transposed  whether the checkpoint holds (inputs, outputs): a Conv1D.
    symmetric   whether ranges are symmetric about zero; False: with zero points.
    search      rounding to nearest: whether ranges are searched for the least squared error.
    solved      instead: whether scales and zero points are those that HQQ finds.
    """

    tensor: str
    module: str
    scheme: str
    group_size: int
    transposed: bool = False
    symmetric: bool = True
    search: bool = False
    solved: bool = False

    @property
    def prefix(self) -> str:
        """The layer's name in the checkpoint."""
        return self.tensor.removesuffix(".weight")


@dataclass(frozen=True)
class Plan:
    """Everything that a run does to a checkpoint's tensors.

    layers      by tensor name.
    left        tensors that stay, each with why.
    skipped     linear layers that stay, as transformers calls them: quantised loaders must be told.
    parts       (name, tensor names): the units of loading, writing and resuming, in order.
    """

    layers: dict[str, Layer]
    left: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]

    def with_schemes(self, schemes: Mapping[str, tuple[str, int]]) -> "Plan":
        """The plan with another (scheme, group size) for some layers, by module."""
        layers = {
            name: replace(layer, scheme=schemes[layer.module][0], group_size=schemes[layer.module][1])
            if layer.module in schemes
            else layer
            for name, layer in self.layers.items()
        }
        return replace(self, layers=layers)

    @property
    def left_alone(self) -> tuple[LeftAlone, ...]:
        """What stays and why: one entry per name with the block's (and the expert's) number starred, and how many."""
        counts: dict[tuple[str, str], list[str]] = {}
        for name, why in self.left:
            counts.setdefault((_BLOCK_NUMBER.sub(".*", name), why), []).append(name)
        return tuple(
            LeftAlone(names[0] if len(names) == 1 else f"{pattern} ({len(names)})", why)
            for (pattern, why), names in counts.items()
        )


def make_plan(
    shapes: Mapping[str, tuple[int, ...]], model: ModelStructure, stage: Quantize | None, changed: bool = False
) -> Plan:
    """Decides for every tensor of the checkpoint (`shapes`, by name).

    stage    the recipe's quantise stage; None: nothing is quantised.
    changed  whether other stages change the blocks' linear layers.

    Raises UserError where a parameter of the model has no tensor, one has the wrong shape, a pattern of the recipe
    matches no layer, the head is to be quantised but is tied to the embedding, or nothing at all is left to quantise.
    """
    missing = model.missing(list(shapes))
    if missing is not None:
        raise UserError(f"tensor {missing} is missing: expected the weights of the whole model; restore the file")
    tied = any(name in model.parameters and model.parameters[name].kind == "head" for name in model.tied)
    if stage is not None and stage.head == "int8" and tied:
        raise UserError(
            "quantize.head: int8 needs an output head of its own, but this model's is tied to its embedding: "
            "set head: keep"
        )
    expert_group = "" if stage is None else _expert_group(shapes, stage)
    planner = _Planner(model, stage, expert_group, changed)
    for name in sorted(shapes):
        planner.decide(name, tuple(shapes[name]))
    planner.check()
    planner.left += [
        (name, f"tied to {other}: stored once") for name, other in model.tied.items() if name not in shapes
    ]
    packed = {layer.module for layer in planner.layers.values()}
    skipped = [p.module for p in model.parameters.values() if p.is_linear and p.module not in packed]
    return Plan(planner.layers, tuple(planner.left), tuple(skipped), _parts(planner.kept, model))


@dataclass
class _Planner:
    """Goes through the tensors and sorts them; `expert_group` is the experts' group size, or why they stay."""

    model: ModelStructure
    stage: Quantize | None
    expert_group: int | str
    changed: bool = False
    layers: dict[str, Layer] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)

    def decide(self, name: str, shape: tuple[int, ...]) -> None:
        """Takes one tensor of the checkpoint."""
        parameter = self.model.find(name)
        if parameter is not None and parameter.kind != "experts" and parameter.shape != shape:
            raise UserError(
                f"tensor {name}: expected shape {list(parameter.shape)} as config.json says, found {list(shape)}: the "
                "two do not belong together"
            )
        if self.model.is_tied(name):
            self.left.append((name, "tied to the embedding: stored once, the file's copy is dropped"))
            return
        self.kept.append(name)
        if (why := self.model.carried(name)) is not None:
            self.left.append((name, why))
            return
        if parameter is None:
            is_expert = _EXPERT.search(name) is not None and len(shape) == 2
            found: Layer | str = self._expert(name) if is_expert else _reason(None)
        elif parameter.kind == "head":
            found = self._head(name, parameter.module)
        elif parameter.kind in ("linear", "conv1d"):
            found = self._linear(name, parameter, shape)
        else:
            found = _reason(parameter)
        if isinstance(found, Layer):
            self.layers[name] = found
        elif found != _CHANGED:
            self.left.append((name, found))

    def check(self) -> None:
        """Raises UserError for a pattern that matches nothing, and where nothing was found to quantise."""
        if self.stage is None:
            return
        parts = [pattern for part in self.stage.layers or () for pattern in part.targets]
        for pattern in (*self.stage.targets, *self.stage.ignore, *parts):
            if pattern not in self.matched and not (pattern == ".*" and not self.layers):
                example = next((layer.module for layer in self.layers.values()), "none")
                raise UserError(
                    f"recipe pattern {pattern!r} matches no linear layer of the model (one of them is {example}): "
                    "correct it"
                )
        if not self.layers:
            inside = (
                (name, why)
                for name, why in self.left
                if name.endswith(".weight") and self.model.block(name) is not None
            )
            kinds = sorted({why for name, why in inside if (found := self.model.find(name)) is None or found.is_linear})
            why = "; ".join(kinds[:3]) or "it has none"
            raise UserError(
                f"no layer of this model can be quantised as {self.stage.scheme or 'the recipe says'} ({why}): change "
                "the recipe"
            )
        check_apart(self.model, _codes(self.stage))
        self._check_parts(self.stage)
        shared = set(self.model.tied.values())
        for layer in self.layers.values():
            if f"{layer.module}.weight" in shared:
                raise UserError(f"tensor {layer.tensor} is shared by several layers: add it to the recipe's ignore")

    def _check_parts(self, stage: Quantize) -> None:
        """compressed-tensors' loader joins no plain tensors (experts, convolutions): the model would never load."""
        codes = _codes(stage)
        for name, why in self.left if codes.library == "compressed-tensors" else ():
            is_expert = _EXPERT.search(name) is not None
            joined = self.model.names.place(name).is_part and name.endswith(".weight")
            joined = joined and not self.model.is_draft_head(name)  # those it does not load
            if joined and (is_expert or not codes.is_float):
                others = "int4 or int8 on all of them, or nf4" if is_expert else "nf4, or fp8 in models without experts"
                raise UserError(
                    f"tensor {name} would stay as it is ({why}), but beside {stage.scheme} layers transformers joins "
                    f"no such tensors into one: use {others}"
                )

    def _head(self, name: str, module: str) -> Layer | str:
        if self.stage is None:
            return "the output head: the recipe quantises nothing"
        if self.stage.head == "keep":
            return "the output head: the recipe says head: keep"
        return Layer(name, module, _scheme(self.stage), 0)

    def _expert(self, name: str) -> Layer | str:
        if self.stage is None:
            return self._unquantised()
        refused = self._chosen(self.stage, name.removesuffix(".weight"))
        if refused is not None:
            return refused
        if self.stage.layers is not None:
            return "an expert: method per-layer does not take experts apart"
        if isinstance(self.expert_group, str):
            return self.expert_group
        module = name.removesuffix(".weight")
        return Layer(name, module, _scheme(self.stage), self.expert_group, **_rounding(self.stage))

    def _linear(self, name: str, parameter: Parameter, shape: tuple[int, ...]) -> Layer | str:
        if self.model.block(name) is None:
            return "a linear layer outside the blocks"
        if self.stage is None:
            return self._unquantised()
        refused = self._chosen(self.stage, parameter.module)
        if refused is not None:
            return refused
        stage = self.stage.of(parameter.module)
        if stage is None:
            return "in none of the recipe's layers"
        transposed, codes = parameter.kind == "conv1d", _codes(stage)
        if why := refusal(self.model, name, parameter, codes):
            return why
        if shape[0] % codes.outputs:
            return f"{shape[0]} outputs are no multiple of {codes.outputs}, which {codes.library} asks for"
        group: int | str = _group(shape[0] if transposed else shape[1], stage)
        if codes.library == "compressed-tensors" and _EXPERT.search(name):
            group = self.expert_group  # loaded as single layers, and still named as one
        if isinstance(group, str):
            return group
        symmetric = stage.symmetric is not False
        return Layer(name, parameter.module, _scheme(stage), group, transposed, symmetric, **_rounding(stage))

    def _unquantised(self) -> str:
        return _CHANGED if self.changed else "the recipe changes no weights"

    def _chosen(self, stage: Quantize, module: str) -> str | None:
        """Why the recipe leaves a layer alone, or None where it wants it."""
        ignoring = {p for p in stage.ignore if re.search(p, module)}
        targeting = {p for p in stage.targets if re.search(p, module)}
        inside = {p for part in stage.layers or () for p in part.targets if re.search(p, module)}
        self.matched |= ignoring | targeting | inside
        if ignoring:
            return f"the recipe ignores {min(ignoring)!r}"
        return None if targeting else "not among the recipe's targets"


def check_shared(model: ModelStructure) -> None:
    """Raises UserError where blocks share tensors: working on one block after the other would change it for others."""
    for name, other in model.tied.items():
        if model.block(name) is not None or model.block(other) is not None:
            raise UserError(
                f"tensor {other} is shared with {name}: blocks that are worked on one after the other must not share "
                "any; use a recipe that only rounds to nearest, with this tensor in its ignore"
            )


def _rounding(stage: Quantize) -> dict[str, bool]:
    return {"search": stage.method == "rtn" and bool(stage.search), "solved": stage.method == "hqq"}


def _scheme(stage: Quantize) -> str:
    """A stage's scheme; int4 where it names none: sensitivity starts from it, and whatever per-layer takes is stored in
    its library's format."""
    return stage.scheme or "int4"


def _codes(stage: Quantize) -> CodeKind:
    """What that scheme's layers are stored as."""
    return SCHEMES[_scheme(stage)].codes


def _group(inputs: int, stage: Quantize) -> int | str:
    """The group size for rows of `inputs` weights, or why there is none."""
    offered = SCHEMES[_scheme(stage)].group_sizes
    if not offered:
        return 0
    wanted = stage.group_size or offered[0]
    sizes = [size for size in offered if size <= wanted]
    fitting = next((size for size in sizes if inputs % size == 0), None)
    return fitting or f"rows of {inputs} weights are no multiple of {' or '.join(map(str, sizes))}"


def _expert_group(shapes: Mapping[str, tuple[int, ...]], stage: Quantize) -> int | str:
    """The one group size of all experts, or why they stay.

    transformers fuses experts on loading. It dequantises symmetric `weight_packed` on the way there (the int8 format
    writes experts so), with one scheme for all experts; bitsandbytes' experts stay plain.
    """
    if why := _codes(stage).no_experts:
        return f"an expert: {why}"
    if stage.symmetric is False or SCHEMES[_scheme(stage)].is_static:
        return "an expert: transformers reads fused experts only with symmetric ranges and without static inputs"
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


def _parts(kept: Iterable[str], model: ModelStructure) -> tuple[tuple[str, tuple[str, ...]], ...]:
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
