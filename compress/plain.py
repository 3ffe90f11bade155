"""Rounding without text, tensor by tensor: to the nearest code, or by HQQ. No block is built."""

from collections.abc import Sequence

from torch import Tensor

from compress.plan import Layer, Plan
from compress.quantize import rtn
from compress.report.facts import LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import check_finite, stored_scale_dtype


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
        stored, record = _quantized(tensor, layer)
        tensors |= stored
        records.append(record)
    return tensors, records


def rounded(weight: Tensor, layer: Layer) -> PackedWeight:
    """A weight (outputs, inputs) rounded as its layer's plan says, without looking at text."""
    if layer.solved:
        from compress.quantize import grid, hqq

        wanted = grid.Grid(rtn.BITS[layer.scheme], layer.group_size, layer.symmetric)
        return hqq.quantize(weight, wanted, stored_scale_dtype(weight.dtype))
    return rtn.quantize(weight, layer.scheme, layer.group_size, symmetric=layer.symmetric, search=layer.search)


def _quantized(weight: Tensor, layer: Layer) -> tuple[dict[str, Tensor], LayerRecord]:
    if layer.transposed:
        weight = weight.T.contiguous()
    packed = rounded(weight, layer)
    stored = rtn.to_tensors(packed, layer.prefix, weight.dtype)
    record = LayerRecord(
        name=layer.prefix,
        scheme=layer.scheme,
        group_size=layer.group_size,
        weights=weight.numel(),
        stored_bytes=sum(t.numel() * t.element_size() for t in stored.values()),
        error=rtn.relative_error(weight, dequantize(packed)),
    )
    return stored, record
