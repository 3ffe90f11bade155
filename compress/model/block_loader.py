"""Decoder layers of transformers, filled from the shards one at a time, and what the artifact is to hold of them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.model import experts
from compress.model.block import Block, cast, stored_dtype
from compress.model.experts import UnfusedExperts
from compress.model.structure import ModelStructure, make_buffers
from compress.records import LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import to_tensors
from runtime.formats.tensors import check_finite, tensor_bytes


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint's tensor lies in a block: a module's path and the name of the parameter in it."""

    path: str
    leaf: str


@dataclass(frozen=True)
class BlockLoader:
    """The blocks of a checkpoint, read one at a time into the modules of its structure."""

    checkpoint: Checkpoint
    structure: ModelStructure

    def meta_block(self, number: int, names: Sequence[str]) -> Block:
        """Block `number` without weights, on the meta device: what there is, and how large.

        names  the checkpoint's tensors that belong to it. Raises UserError for experts that cannot be taken apart.
        """
        config, text = self.structure.config, self.structure.text_config
        layer = copy.deepcopy(self.structure.layers[number], {id(config): config, id(text): text})
        _without_conv1d(layer)
        experts.unfuse(layer)
        block = Block(number, f"{self.structure.blocks_at}.{number}", layer, {}, {}, {})
        for name in names:
            slot = self.slot(name)
            if slot is not None:
                self._register(block, name, slot)
        return block

    def load(self, number: int, names: Sequence[str]) -> Block:
        """Block `number` with its weights in float32. Raises UserError for weights that are missing or not finite."""
        block = self.meta_block(number, names)
        for module in block.module.modules():
            make_buffers(self.structure.model, module)
        for name in names:
            slot = self.slot(name)
            if slot is not None:
                tensor = self.checkpoint.tensor(name)
                check_finite(name, tensor)
                _fill(block.module.get_submodule(slot.path), slot.leaf, tensor)
        for slot, tensor in self._made(names):
            _fill(block.module.get_submodule(slot.path), slot.leaf, tensor)
        empty = next((name for name, p in block.module.named_parameters() if p.is_meta), None)
        if empty is not None:
            raise UserError(f"tensor {block.prefix}.{empty} is missing: expected the weights of the whole model")
        return block

    def slot(self, name: str) -> Slot | None:
        """Where a tensor of a block lies in it; None for what the model has no parameter for (old masks, mostly)."""
        parameter, place = self.structure.find(name), self.structure.names.place(name)
        path = f"{place.expert or ''}.weight"
        if parameter is not None or place.name in self.structure.buffers:
            path = place.name
        number, blocks = self.structure.block(name), self.structure.blocks_at.rpartition(".")[2]
        return _slot(path, f"{blocks}.{number}")

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
            dtype = stored_dtype(self.checkpoint, name)
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
        for slot, tensor in self._made(names):
            if not torch.equal(_value(block.module.get_submodule(slot.path), slot.leaf, block.prefix), tensor.float()):
                raise UserError(
                    f"tensor {block.prefix}.{slot.path}.{slot.leaf}: expected a weight that no stage changes, for "
                    "transformers makes it of several tensors of the checkpoint: use a recipe without this stage"
                )
        return tensors, list(records.values())

    def _made(self, names: Sequence[str]) -> Iterator[tuple[Slot, Tensor]]:
        """What transformers makes of those tensors of a block that are no parameters by themselves, experts apart."""
        places = {name: self.structure.names.place(name) for name in names}
        parts = {n: self.checkpoint.tensor(n) for n, place in places.items() if place.is_part and not place.expert}
        for name, tensor in self.structure.names.make(parts).items():
            slot = _slot(name, f"{self.structure.blocks_at.rpartition('.')[2]}.{self.structure.block(name)}")
            if slot is not None:
                yield slot, check_finite(name, tensor)

    def _register(self, block: Block, name: str, slot: Slot) -> None:
        """Notes the linear layers that a tensor is the weight of: one, or those of the experts that it fuses."""
        module = block.module.get_submodule(slot.path)
        if isinstance(module, UnfusedExperts):
            parts = ("down_proj",) if slot.leaf == "down_proj" else module.first
            found = [(f"{slot.path}.{number}.{part}", part, number) for number in range(len(module)) for part in parts]
            names = [f"{name.rpartition('.')[0]}.{number}.{part}" for _, part, number in found]
            paths = [path for path, _, _ in found]
        else:
            paths, names = [slot.path], [name.removesuffix(".weight")]
        for path, shown in zip(paths, names, strict=True):
            layer = block.module.get_submodule(path)
            parameter = self.structure.find(name)
            if (
                isinstance(layer, nn.Linear)
                and slot.leaf != "bias"
                and (parameter is None or parameter.kind in ("linear", "conv1d", "experts"))
            ):
                block.linears[path] = layer
                block.names[path], block.dtypes[path] = shown, stored_dtype(self.checkpoint, name)


def _slot(path: str, block: str) -> Slot | None:
    """Where a parameter lies in the block ("layers.3") that it belongs to."""
    _, found, inside = f".{path}".partition(f".{block}.")
    place, _, leaf = inside.rpartition(".")
    return Slot(place, leaf) if found else None


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
                for linear, half in zip(parts.first, weight.chunk(len(parts.first)), strict=True):
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
        return torch.stack([torch.cat([layer.weight for layer in expert.first]) for expert in parts])
    value = getattr(module, leaf)
    if not isinstance(value, Tensor):
        raise ValueError(f"tensor {name}: expected a parameter or buffer, found {type(value).__name__}")
    return value.T.contiguous() if _is_transposed(module, leaf) else value
