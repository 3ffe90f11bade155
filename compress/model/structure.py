"""A model without weights, whose decoder layers are filled from the shards one at a time.

transformers builds it on the meta device, in no memory; its own decoder layers then work on real weights, so that every
architecture that it knows can be calibrated. Code that comes with a checkpoint is never run.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from compress.artifact import safetensors
from compress.errors import UserError
from compress.model import experts
from compress.model.block import Block, cast
from compress.model.experts import UnfusedExperts
from compress.records import LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import to_tensors
from runtime.formats.tensors import check_finite, tensor_bytes

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["linear", "conv1d", "router", "experts", "embedding", "norm", "head", "bias", "other"]

_ROUTERS = {"gate", "router", "shared_expert_gate"}
# Names that older checkpoints have, and what transformers calls the same module today.
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Parameter:
    """One parameter as transformers names it.

    shape          transformers' (a Conv1D is (inputs, outputs)).
    linear_router  whether it is the weight of a router that is an ordinary nn.Linear.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    linear_router: bool = False

    @property
    def module(self) -> str:
        """The module that the parameter belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a module that quantised loaders replace unless they are told not to."""
        return self.kind in ("linear", "conv1d", "head") or self.linear_router


@dataclass(frozen=True)
class Survey:
    """A model's parameters by name, where its blocks are, and which names share their tensor with which.

    blocks_at    module that holds the blocks ("model.layers").
    base_prefix  the prefix of the body's parameters ("model"), which some checkpoints leave out.
    tied         name -> the name whose tensor it shares.
    """

    parameters: dict[str, Parameter]
    blocks_at: str
    base_prefix: str
    tied: dict[str, str]

    def find(self, tensor: str) -> Parameter | None:
        """The parameter that a checkpoint's tensor is, or None (a buffer, or part of a parameter fused on loading)."""
        for name in self._spellings(tensor):
            if name in self.parameters:
                return self.parameters[name]
        return None

    def block(self, tensor: str) -> int | None:
        """The number of the block that a checkpoint's tensor belongs to, or None."""
        for name in self._spellings(tensor):
            match = re.match(rf"{re.escape(self.blocks_at)}\.(\d+)\.", name)
            if match:
                return int(match[1])
        return None

    def is_tied(self, tensor: str) -> bool:
        """Whether the tensor only repeats the one that it is tied to."""
        return any(name in self.tied for name in self._spellings(tensor))

    def _spellings(self, tensor: str) -> list[str]:
        names = [tensor, f"{self.base_prefix}.{tensor}", tensor.removeprefix(f"{self.base_prefix}.")]
        for old, new in _RENAMED:
            names += [name.replace(old, new) for name in names if old in name]
        return names

    def missing(self, tensors: list[str]) -> str | None:
        """The first parameter that no tensor of the checkpoint gives, or None.

        A parameter of fused experts is there if the checkpoint has any of its block's experts: how they are fused is
        transformers' business.
        """
        found = {parameter.name for tensor in tensors if (parameter := self.find(tensor))}
        with_experts = {self.block(tensor) for tensor in tensors if _EXPERT.search(tensor)}
        for name, parameter in self.parameters.items():
            if name in found or self.tied.get(name, name) in found - {name}:
                continue
            if parameter.kind == "experts" and self.block(name) in with_experts:
                continue
            return name
        return None


def survey(folder: Path) -> Survey:
    """Surveys the model that `folder`/config.json describes.

    Raises UserError where transformers cannot build a causal language model from it without foreign code.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # somebody else's file in a library that raises whatever its layers do
        reason = " ".join(str(error).split())[:160]
        if "Unrecognized configuration class" in reason:
            reason = f"model_type {config.model_type!r} is another kind of model"
        raise UserError(
            f"{folder.name}/config.json: expected an architecture that transformers knows as a causal language model, "
            f"found one it cannot build ({reason}): use another model"
        ) from error
    return _survey(model, config, folder)


def _survey(model: Any, config: Any, folder: Path) -> Survey:
    from torch import nn

    parameters = dict(model.named_parameters(remove_duplicate=False))
    count = getattr(config, "num_hidden_layers", None)
    blocks_at = _blocks(model, count)
    if blocks_at is None:
        raise UserError(
            f"{folder.name}/config.json: expected a model of {count} equal blocks, found none in a "
            f"{type(model).__name__}: this architecture is not supported"
        )
    tied = _shared(parameters) | dict(getattr(model, "all_tied_weights_keys", None) or {})
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    described = {}
    for name, parameter in parameters.items():
        module = modules[name.rpartition(".")[0]]
        kind: Kind = "head" if module is head and name.endswith(".weight") else _kind(name, parameter, module)
        linear_router = kind == "router" and isinstance(module, nn.Linear) and name.endswith(".weight")
        described[name] = Parameter(name, kind, tuple(parameter.shape), linear_router)
    return Survey(described, blocks_at, str(model.base_model_prefix), tied)


def _shared(parameters: dict[str, Any]) -> dict[str, str]:
    """Names of one and the same parameter: a module that several others share."""
    first: dict[int, str] = {}
    return {name: first[id(p)] for name, p in parameters.items() if first.setdefault(id(p), name) != name}


def _blocks(model: "nn.Module", count: Any) -> str | None:
    """The largest list of `count` modules that lies in no other list."""
    from torch import nn

    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outer = {n: size for n, size in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    return max(outer, key=lambda name: outer[name], default=None)


def _kind(name: str, parameter: Any, module: Any) -> Kind:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    class_name, owner, leaf = type(module).__name__, name.split(".")[-2], name.rpartition(".")[2]
    if "norm" in class_name.lower():
        return "norm"
    if owner in _ROUTERS or "router" in class_name.lower():
        return "router"
    if leaf == "bias":
        return "bias"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if parameter.ndim == 3 or "expert" in class_name.lower():
        return "experts"
    return "other"


_DTYPES = {name: dtype for dtype, name in safetensors.NAMES.items()}


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint's tensor lies in a block: a module's path and the name of the parameter in it."""

    path: str
    leaf: str


class Skeleton:
    """The model of a checkpoint without its weights."""

    def __init__(self, checkpoint: Checkpoint, model: Survey):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint, self.survey = checkpoint, model
        self.config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                self.config, trust_remote_code=False, dtype=torch.float32
            ).eval()
        self.layers: Sequence[nn.Module] = list(self.model.get_submodule(model.blocks_at))  # type: ignore[arg-type]

    def bare(self, number: int, names: Sequence[str]) -> Block:
        """Block `number` without weights, on the meta device: what there is, and how large.

        names  the checkpoint's tensors that belong to it. Raises UserError for experts that cannot be taken apart.
        """
        layer = copy.deepcopy(self.layers[number], {id(self.config): self.config})
        _without_conv1d(layer)
        experts.unfuse(layer)
        block = Block(number, f"{self.survey.blocks_at}.{number}", layer, {}, {}, {})
        for name in names:
            slot = self.slot(name)
            if slot is not None:
                self._register(block, name, slot)
        return block

    def block(self, number: int, names: Sequence[str]) -> Block:
        """Block `number` with its weights in float32. Raises UserError for weights that are missing or not finite."""
        block = self.bare(number, names)
        for module in block.module.modules():
            make_buffers(self.model, module)
        for name in names:
            slot = self.slot(name)
            if slot is not None:
                tensor = self.checkpoint.tensor(name)
                check_finite(name, tensor)
                _fill(block.module.get_submodule(slot.path), slot.leaf, tensor)
        empty = next((name for name, p in block.module.named_parameters() if p.is_meta), None)
        if empty is not None:
            raise UserError(f"tensor {block.prefix}.{empty} is missing: expected the weights of the whole model")
        return block

    def slot(self, name: str) -> Slot | None:
        """Where a tensor of a block lies in it; None for what the model has no parameter for (old masks, mostly)."""
        parameter = self.survey.find(name)
        path = parameter.name if parameter is not None else f"{experts.module_path(name) or ''}.weight"
        number, blocks = self.survey.block(name), self.survey.blocks_at.rpartition(".")[2]
        _, found, inside = f".{path}".partition(f".{blocks}.{number}.")
        place, _, leaf = inside.rpartition(".")
        return Slot(place, leaf) if found else None

    def stored(self, block: Block, names: Sequence[str]) -> tuple[dict[str, Tensor], list[LayerRecord]]:
        """The block's tensors as the artifact is to have them, and the records of its packed layers.

        The block goes on with what it will be read back with: weights that the checkpoint's type rounds are rounded
        in it too. Raises UserError where a stage has made a weight that this type cannot hold.
        """
        tensors: dict[str, Tensor] = {}
        records = {record.name: record for record in block.records}
        for name in names:
            slot = self.slot(name)
            if slot is None:
                tensors[name] = self.checkpoint.tensor(name)
                continue
            dtype = self._dtype(name)
            packed = block.packed.get(slot.path) if slot.leaf == "weight" else None
            if packed is None:
                module = block.module.get_submodule(slot.path)
                tensors[name] = cast(_value(module, slot.leaf, name), dtype, name)
                if dtype.itemsize < 4:
                    _fill(module, slot.leaf, tensors[name])
                continue
            prefix = name.removesuffix(".weight")
            made = to_tensors(packed, prefix, dtype)
            records[prefix] = replace(records[prefix], stored_bytes=tensor_bytes(made))
            tensors |= made
        return tensors, list(records.values())

    def _dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.checkpoint.shards.entry(name).dtype]

    def _register(self, block: Block, name: str, slot: Slot) -> None:
        """Notes the linear layers that a tensor is the weight of: one, or those of the experts that it fuses."""
        module = block.module.get_submodule(slot.path)
        if isinstance(module, UnfusedExperts):
            parts = ("gate_proj", "up_proj") if slot.leaf == "gate_up_proj" else ("down_proj",)
            found = [(f"{slot.path}.{number}.{part}", part, number) for number in range(len(module)) for part in parts]
            names = [f"{name.rpartition('.')[0]}.{number}.{part}" for _, part, number in found]
            paths = [path for path, _, _ in found]
        else:
            paths, names = [slot.path], [name.removesuffix(".weight")]
        for path, shown in zip(paths, names, strict=True):
            layer = block.module.get_submodule(path)
            parameter = self.survey.find(name)
            if (
                isinstance(layer, nn.Linear)
                and slot.leaf != "bias"
                and (parameter is None or parameter.kind in ("linear", "conv1d", "experts"))
            ):
                block.linears[path] = layer
                block.names[path], block.dtypes[path] = shown, self._dtype(name)


def make_buffers(model: Any, module: nn.Module) -> None:
    """Gives a module of the meta device its own buffers: transformers computes them where it makes weights.

    The module's weights must still be on the meta device: elsewhere they would be made anew as well.
    """
    empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
    if not empty:
        return
    if any(not parameter.is_meta for parameter in module.parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__}: buffers come before weights")
    for name, buffer in empty.items():
        module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.no_grad():
        model._init_weights(module)


def _without_conv1d(layer: nn.Module) -> None:
    """Replaces GPT-2's Conv1D, weights (inputs, outputs), by linear layers without weights yet."""
    from transformers.pytorch_utils import Conv1D

    for path, module in list(layer.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.from_conv1d = True  # type: ignore[assignment]
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, linear)


def _is_transposed(module: nn.Module, leaf: str) -> bool:
    return leaf == "weight" and bool(getattr(module, "from_conv1d", False))


def _fill(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Puts a tensor of the checkpoint into its place, as a float32 copy (the file's memory is not for writing to)."""
    if _is_transposed(module, leaf):
        tensor = tensor.T
    if isinstance(module, UnfusedExperts):
        for expert, weight in zip(module, tensor, strict=True):
            parts: Any = expert
            if leaf == "down_proj":
                _fill(parts.down_proj, "weight", weight)
            else:
                for linear, half in zip((parts.gate_proj, parts.up_proj), weight.chunk(2), strict=True):
                    _fill(linear, "weight", half)
        return
    value = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))


def _value(module: nn.Module, leaf: str, name: str) -> Tensor:
    """A parameter or buffer as the checkpoint has it."""
    if isinstance(module, UnfusedExperts):
        parts: Any = list(module)
        if leaf == "down_proj":
            return torch.stack([expert.down_proj.weight for expert in parts])
        return torch.stack([torch.cat([expert.gate_proj.weight, expert.up_proj.weight]) for expert in parts])
    value = getattr(module, leaf)
    if not isinstance(value, Tensor):
        raise ValueError(f"tensor {name}: expected a parameter or buffer, found {type(value).__name__}")
    return value.T.contiguous() if _is_transposed(module, leaf) else value
