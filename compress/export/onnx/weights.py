"""Where the initialisers of a traced graph come from: an artifact's tensors, by transformers' parameter names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compress.errors import UserError
from compress.export.layers import weight_of
from compress.model.structure import ModelStructure, read_structure
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import check_finite

Weight = PackedWeight | Tensor
# Fused experts, and the linear layers of one expert that each is made of, in order.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint under the names of a model's parameters."""

    checkpoint: Checkpoint

    @cached_property
    def structure(self) -> ModelStructure:
        """The model's parameters. Raises UserError for an architecture that transformers does not know."""
        return read_structure(self.checkpoint.path)

    @cached_property
    def _tensors(self) -> dict[str, str]:
        """Parameter → tensor, where one is the other (packed layers have none)."""
        return {p.name: name for name in self.checkpoint.names() if (p := self.structure.find(name)) is not None}

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        """Path of a linear layer in the model, experts apart → its name in the checkpoint."""
        out: dict[str, str] = {}
        for prefix in dict.fromkeys(name.rpartition(".")[0] for name in self.checkpoint.names()):
            found = self.structure.find(f"{prefix}.weight")
            path = found.module if found is not None else self.structure.names.place(f"{prefix}.weight").expert
            if path is not None:
                out[path] = prefix
        return out

    def weight(self, parameter: str) -> Weight:
        """A parameter's value: packed where it is the weight of a packed linear layer; a Conv1D's is (K, N) if plain.

        Raises UserError where the checkpoint has nothing of that name, and for values that are not finite.
        """
        module, _, leaf = parameter.rpartition(".")
        if leaf in ("weight", "bias") and module in self._prefixes:
            layer = self._layer(module)
            if isinstance(layer, PackedWeight) and leaf == "weight":
                return layer
            # A packed layer's bias is what its format says, which need not be the tensor as it lies there.
            if isinstance(layer, PackedWeight) and layer.bias is not None:
                return layer.bias
        if parameter in self._tensors:
            name = self._tensors[parameter]
            return check_finite(name, self.checkpoint.tensor(name))
        if leaf in _FUSED and (parts := self._expert_layers(module, leaf)):
            return torch.stack([torch.cat([plain(self._layer(path)) for path in expert]) for expert in parts])
        for name in self._shared(parameter):
            if name in self._tensors or name.rpartition(".")[0] in self._prefixes:
                return self.weight(name)
        raise UserError(
            f"{self.checkpoint.path.name}: expected a tensor for {parameter}, found none: the checkpoint is incomplete"
        )

    def packed_experts(self, parameter: str) -> PackedWeight | None:
        """Fused experts (E · N, K), one below the other, where they are packed and all alike; None where they are not.

        Raises UserError for packed experts in activation order.
        """
        module, _, leaf = parameter.rpartition(".")
        parts = self._expert_layers(module, leaf) if leaf in _FUSED and parameter not in self._tensors else []
        layers = [self._layer(path) for expert in parts for path in expert]
        packed = [layer for layer in layers if isinstance(layer, PackedWeight)]
        if not packed or len(packed) < len(layers) or len({(p.scheme, p.offset is None) for p in packed}) > 1:
            return None
        if any(p.perm is not None for p in packed):
            raise UserError(
                f"{parameter}: expected experts in input order, found activation order, which gathering experts cannot"
                " follow: compress them without it"
            )
        offsets = [p.offset for p in packed if p.offset is not None]
        return replace(
            packed[0],
            codes=torch.cat([p.codes for p in packed]),
            scale=torch.cat([p.scale for p in packed]),
            offset=torch.cat(offsets) if offsets else None,
            bias=None,
            input_scale=None,
        )

    def _expert_layers(self, module: str, leaf: str) -> list[list[str]]:
        """Of each expert the linear layers that a fused parameter is made of; empty where it has none of its own."""
        out: list[list[str]] = []
        while all(f"{module}.{len(out)}.{part}" in self._prefixes for part in _FUSED[leaf]):
            out.append([f"{module}.{len(out)}.{part}" for part in _FUSED[leaf]])
        return out

    def _layer(self, path: str) -> Weight:
        return weight_of(self.checkpoint, self._prefixes[path])

    def _shared(self, parameter: str) -> list[str]:
        """Other names of the same parameter."""
        tied: Mapping[str, str] = self.structure.tied
        root = tied.get(parameter, parameter)
        return [name for name in (root, *(n for n, to in tied.items() if to == root)) if name != parameter]


def plain(weight: Weight) -> Tensor:
    """The weight as floats."""
    return dequantize(weight) if isinstance(weight, PackedWeight) else weight
