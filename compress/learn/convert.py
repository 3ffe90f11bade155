"""A packed model as a transformers model with layers to train, and back: the directory with what they have become.

Everything is read from the packed directory; of the original only the architecture is taken, and the weights that tell
which codes were nearly rounded the other way. Norms are trained; other plain tensors stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.export import prefixes
from compress.learn.layers import KINDS, LearnedGrid, LearnedLinear, learned
from compress.model import directory
from compress.model.block import cast, stored_dtype
from compress.model.structure import ModelStructure, Parameter, read_structure
from compress.recipe.training_stages import Learn
from compress.training import float_model
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.formats import to_tensors
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import stored_scale_dtype


@dataclass(frozen=True)
class LearnedModel:
    """A model whose packed layers can be trained, and where it comes from.

    model       of transformers, float32.
    checkpoint  the packed directory.
    structure   of the original.
    layers      by the names that the packed directory has for them.
    dtypes      what the original has those layers' weights in.
    """

    model: Any
    checkpoint: Checkpoint
    structure: ModelStructure
    layers: dict[str, LearnedLinear]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def load(cls, folder: Path, original: Path, stage: Learn, device: str) -> "LearnedModel":
        """The packed model in `folder`, which was made of `original`.

        Raises UserError for a layer that cannot be trained: other codes than `learned` knows, experts that are fused,
        or shapes that are not the original's.
        """
        checkpoint, plain, structure = open_checkpoint(folder), open_checkpoint(original), read_structure(original)
        model = float_model.load(original).requires_grad_(False)
        layers, dtypes = {}, {}
        for prefix in prefixes(checkpoint.names()):
            packed, name = checkpoint.weight(prefix), f"{prefix}.weight"
            parameter = structure.find(name)
            module = "" if parameter is None else parameter.name.removesuffix(".weight")
            linear = model.get_submodule(module)
            if not isinstance(packed, PackedWeight) or not isinstance(linear, nn.Linear):
                raise UserError(f"layer {prefix}: learn trains ordinary linear layers, found another: leave learn out")
            if packed.scheme.kind not in KINDS or packed.shape != tuple(linear.weight.shape):
                raise UserError(
                    f"layer {prefix}: learn trains {' or '.join(sorted(KINDS))} codes of {list(linear.weight.shape)}, "
                    f"found {packed.scheme.kind} of {list(packed.shape)}: leave learn out"
                )
            dtypes[prefix] = stored_dtype(plain, name)
            exact = linear.weight.detach() if stage.rounding else None
            stored = stored_scale_dtype(dtypes[prefix])
            layers[prefix] = learned(packed, linear.bias, stored, exact, stage.reach)
            model.set_submodule(module, layers[prefix])
        found = cls(model.to(device), checkpoint, structure, layers, dtypes)
        found._fill()
        return found

    @torch.no_grad()
    def _fill(self) -> None:
        """Takes the plain tensors of the packed directory, in which channels may be scaled."""
        for name, found in self._plain():
            self.model.get_parameter(found.name).copy_(self.checkpoint.tensor(name))

    def _is_packed(self, tensor: str) -> bool:
        """Whether a tensor of the packed directory is of a layer's codes. Biases are tensors of their own."""
        module, _, leaf = tensor.rpartition(".")
        return module in self.layers and leaf != "bias"

    def _plain(self) -> Iterator[tuple[str, Parameter]]:
        """The packed directory's tensors that are parameters of the model, tied ones once, and what they are there."""
        for name in self.checkpoint.names():
            found = self.structure.find(name)
            if found is not None and not self._is_packed(name) and not self.structure.is_tied(name):
                yield name, found

    def norms(self) -> list[nn.Parameter]:
        """The norms' weights."""
        return [self.model.get_parameter(found.name) for _, found in self._plain() if found.kind == "norm"]

    def share_moved(self) -> float:
        """Share of the codes that are others than at the beginning."""
        grids = [layer for layer in self.layers.values() if isinstance(layer, LearnedGrid)]
        if not grids:
            return 0.0
        with torch.no_grad():
            moved = sum(int((layer.moved() != layer.codes).sum()) for layer in grids)
        return moved / sum(layer.codes.numel() for layer in grids)

    def write(self, folder: Path, shard_bytes: int) -> None:
        """Writes the model as it is now to `folder`: the packed directory's tensors by the same names, in its types.

        Raises UserError for a value that its type cannot hold.
        """
        trained = {name: self.model.get_parameter(found.name) for name, found in self._plain()}

        def parts() -> Iterator[dict[str, Tensor]]:
            for prefix, layer in self.layers.items():
                yield to_tensors(layer.packed(), prefix, self.dtypes[prefix])
            for name in self.checkpoint.names():
                if name in trained:
                    yield {name: cast(trained[name].detach().cpu(), stored_dtype(self.checkpoint, name), name)}
                elif not self._is_packed(name):
                    yield {name: self.checkpoint.tensor(name)}

        directory.write_model(parts(), self.checkpoint.path, folder, shard_bytes)
