"""Rounding to nearest, tensor by tensor: no block is built, no text is looked at."""

from collections.abc import Sequence

from torch import Tensor

from compress.plan import Layer, Plan
from compress.quantize import rtn
from compress.report.facts import LayerRecord
from runtime.checkpoint import Checkpoint, check_finite
from runtime.formats import dequantize


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


def _quantized(weight: Tensor, layer: Layer) -> tuple[dict[str, Tensor], LayerRecord]:
    if layer.transposed:
        weight = weight.T.contiguous()
    packed = rtn.quantize(weight, layer.scheme, layer.group_size, symmetric=layer.symmetric, search=layer.search)
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
