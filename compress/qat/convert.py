"""A transformers model with layers that are trained rounded, and back: what its directory holds once it is packed.

The plan says which layers (compress.model.plan: by the recipe's targets and ignore). Only linear layers of their own
can be replaced. Experts that transformers fuses into one tensor are left alone, and named among what is; they are not
trained either, because their tensors come back from the checkpoint as they were.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.artifact import SHARD_BYTES
from compress.errors import UserError
from compress.model import directory
from compress.model.block import cast, stored_dtype
from compress.model.plan import Layer, Plan
from compress.model.structure import ModelStructure
from compress.qat.layers import BitLinear, QuantizedLinear
from compress.quantize import rtn
from compress.recipe.training_stages import Qat, Ternary
from compress.records import LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize, to_tensors
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import tensor_bytes

RoundedLinear = BitLinear | QuantizedLinear


def rounded_linear(stage: Ternary | Qat, layer: Layer, linear: nn.Linear, stored: torch.dtype) -> RoundedLinear:
    """What a layer becomes, without weights yet. `stored`: the dtype that the model is stored in."""
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    if isinstance(stage, Ternary):
        return BitLinear(*sizes, codes=stage.weights, stored=stored, gains=stage.scales > 0, device="meta")
    scheme = SCHEMES[layer.scheme].scheme(layer.group_size, layer.symmetric)
    return QuantizedLinear(*sizes, scheme=scheme, stored=stored, int8_inputs=stage.int8_inputs, device="meta")


def convert(model: nn.Module, plan: Plan, checkpoint: Checkpoint, stage: Ternary | Qat) -> None:
    """Replaces the plan's layers in place; their parameters stay the same objects, in the dtype that they have.

    Gains of scales, where the stage trains them, are new ones.

    checkpoint  the model's: scales are rounded to what its dtype holds.
    Raises UserError for a layer that is no nn.Linear.
    """
    for layer in plan.layers.values():
        linear = model.get_submodule(layer.module)
        if not isinstance(linear, nn.Linear) or layer.transposed:
            raise UserError(
                f"layer {layer.module}: expected an ordinary linear layer to train, found a {type(linear).__name__}: "
                "add it to the stage's ignore"
            )
        made = rounded_linear(stage, layer, linear, stored_dtype(checkpoint, layer.tensor))
        made.weight, made.bias = linear.weight, linear.bias
        if isinstance(made, BitLinear) and made.gain is not None:
            made.gain = nn.Parameter(torch.zeros_like(made.gain, device=linear.weight.device))
        model.set_submodule(layer.module, made)


def freeze_experts(model: nn.Module, structure: ModelStructure) -> list[str]:
    """Keeps fused experts, whose tensors `RoundedModel` takes from the checkpoint, from training; their names."""
    frozen = [name for name, found in structure.parameters.items() if found.kind == "experts"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def rounded_layers(model: nn.Module) -> Iterator[RoundedLinear]:
    """The layers that `convert` has put in."""
    for module in model.modules():
        if isinstance(module, BitLinear | QuantizedLinear):
            yield module


def set_share(model: nn.Module, share: float) -> None:
    """Sets λ of every BitLinear. Layers for quantisation-aware training have none: they are always rounded."""
    for module in rounded_layers(model):
        if isinstance(module, BitLinear):
            module.share = share


@dataclass(frozen=True)
class RoundedModel:
    """A converted model and where it comes from.

    model       with the plan's layers converted.
    checkpoint  the plain directory that it was read from; structure and plan are of that.
    """

    model: Any
    checkpoint: Checkpoint
    structure: ModelStructure
    plan: Plan

    def tensors(self, names: tuple[str, ...]) -> tuple[dict[str, Tensor], list[LayerRecord]]:
        """What takes the place of the checkpoint's tensors `names`, and a record of every packed layer.

        The model's other weights become what the checkpoint's dtype makes of them. A record's error is that of rounding
        the trained weight. Raises UserError for a weight that the checkpoint's dtype cannot hold.
        """
        stored: dict[str, Tensor] = {}
        records = []
        for name in names:
            layer, dtype = self.plan.layers.get(name), stored_dtype(self.checkpoint, name)
            if layer is not None:
                made, record = self._packed(layer, dtype)
                stored |= made
                records.append(record)
                continue
            parameter = self.structure.find(name)
            if parameter is None or parameter.kind == "experts":
                stored[name] = self.checkpoint.tensor(name)
            else:
                weight = self.model.get_parameter(parameter.name)
                stored[name] = cast(weight.detach().cpu(), dtype, name)
                # The model goes on with what the file holds, so that what is measured is what is written.
                weight.data.copy_(stored[name])
        return stored, records

    def _packed(self, layer: Layer, dtype: torch.dtype) -> tuple[dict[str, Tensor], LayerRecord]:
        module: RoundedLinear = self.model.get_submodule(layer.module)
        packed = module.packed()
        made = to_tensors(packed, layer.prefix, dtype)
        error = rtn.relative_error(module.weight.detach(), dequantize(packed))
        size = tensor_bytes(made)
        return made, LayerRecord(layer.prefix, layer.scheme, layer.group_size, packed.codes.numel(), size, error)

    def write(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> tuple[LayerRecord, ...]:
        """Writes the packed model's directory, `folder`, a part of the plan at a time."""
        records: list[LayerRecord] = []

        def parts() -> Iterator[dict[str, Tensor]]:
            for _, names in self.plan.parts:
                tensors, found = self.tensors(names)
                records.extend(found)
                yield tensors

        quantization = directory.quantization_config(self.plan, self.checkpoint.config)
        directory.write_model(parts(), self.checkpoint.path, folder, shard_bytes, quantization)
        return tuple(records)
