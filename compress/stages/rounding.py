"""What the stages that quantise share: a plan's layers in a block or a checkpoint, and rounding them without text."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from compress.model.block import Block, Statistics
from compress.model.plan import Layer, Plan
from compress.quantize import hqq, rtn
from compress.quantize.grid import Grid
from compress.records import LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize, to_tensors
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import check_finite, stored_scale_dtype, tensor_bytes


def part(checkpoint: Checkpoint, plan: Plan, names: Sequence[str]) -> tuple[dict[str, Tensor], list[LayerRecord]]:
    """The tensors that take the place of the checkpoint's tensors `names`, and a record of each packed layer.

    Raises UserError for weights that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    records = []
    for name in names:
        tensor = checkpoint.tensor(name)
        check_finite(name, tensor)
        layer = plan.layers.get(name)
        if layer is None:
            tensors[name] = tensor
            continue
        weight = tensor.T.contiguous() if layer.transposed else tensor
        packed = rounded(weight, layer)
        stored = to_tensors(packed, layer.prefix, weight.dtype)
        tensors |= stored
        records.append(
            LayerRecord(
                name=layer.prefix,
                scheme=layer.scheme,
                group_size=layer.group_size,
                weights=weight.numel(),
                stored_bytes=tensor_bytes(stored),
                error=rtn.relative_error(weight, dequantize(packed)),
            )
        )
    return tensors, records


def rounded(weight: Tensor, layer: Layer) -> PackedWeight:
    """A weight (outputs, inputs) rounded as its layer's plan says, without looking at text."""
    if layer.solved:
        return hqq.quantize(weight, grid_of(layer), stored_scale_dtype(weight.dtype))
    return rtn.quantize(weight, layer.scheme, layer.group_size, symmetric=layer.symmetric, search=layer.search)


def chosen(block: Block, layers: Mapping[str, Layer]) -> Iterator[tuple[str, Layer]]:
    """The block's linear layers that are to be quantised, by path."""
    for path, name in block.names.items():
        if name in layers:
            yield path, layers[name]


def sharing(paths: Sequence[str], statistics: Statistics) -> list[list[str]]:
    """The layers in groups that read the same input, which are those that share their statistics."""
    groups: dict[int, list[str]] = {}
    for path in paths:
        groups.setdefault(id(statistics[path]), []).append(path)
    return list(groups.values())


def round_to_nearest(block: Block, path: str, layer: Layer) -> None:
    """Packs one linear layer by rounding alone, as its plan says."""
    weight = block.linears[path].weight.detach().to(block.dtypes[path])
    block.pack(path, rounded(weight, layer), layer.scheme)


def scale_dtype(block: Block, path: str) -> torch.dtype:
    """What the scales of a layer are stored in."""
    return stored_scale_dtype(block.dtypes[path])


def grid_of(layer: Layer) -> Grid:
    """The integers that a layer is rounded to."""
    return Grid(SCHEMES[layer.scheme].bits, layer.group_size, layer.symmetric)
