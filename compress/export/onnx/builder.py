"""New nodes and initialisers for a layer of an ONNX graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import UserError

if TYPE_CHECKING:
    import onnx_ir as ir

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

_NAMES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.uint8: "UINT8", torch.int32: "INT32"}


class Builder:
    """New nodes and initialisers of a graph. Their names begin with the layer's."""

    def __init__(self, graph: "ir.Graph", layer: str, dtype: torch.dtype):
        self.graph, self.layer, self.dtype = graph, layer, dtype
        self.nodes: list[ir.Node] = []

    def constant(self, name: str, values: Tensor | np.ndarray) -> "ir.Value":
        """An initialiser `layer.name`."""
        import onnx_ir as ir

        array = values.contiguous().numpy() if isinstance(values, Tensor) else values
        full = f"{self.layer}.{name}"
        value = ir.Value(
            name=full,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.Tensor(array, name=full),
        )
        self.graph.initializers.add(value)
        return value

    def node(self, kind: str, inputs: Sequence["ir.Value | None"], domain: str = "", **attributes: Any) -> "ir.Value":
        """A node's only output."""
        import onnx_ir as ir

        name = f"{self.layer}/{kind}_{len(self.nodes)}"
        made = ir.node(kind, list(inputs), attributes=attributes, domain=domain, name=name)
        made.outputs[0].name = f"{name}_output"
        self.nodes.append(made)
        return made.outputs[0]

    def cast(self, x: "ir.Value", to: torch.dtype) -> "ir.Value":
        """`x` as another dtype."""
        import onnx_ir as ir

        return self.node("Cast", [x], to=int(getattr(ir.DataType, _NAMES[to])))

    def floats(self, values: Tensor) -> Tensor:
        """Scales as the graph's floats. Raises UserError where float16 overflows or loses one altogether."""
        cast = values.to(self.dtype)
        if self.dtype == torch.float16 and not bool((torch.isfinite(cast) & ((cast != 0) | (values == 0))).all()):
            raise UserError(
                f"{self.layer}: expected scales that float16 holds, found {float(values.abs().min()):.3g} to"
                f" {float(values.abs().max()):.3g}: export to onnx, which has float32"
            )
        return cast


def present(value: "ir.Value | None") -> "ir.Value":
    """An input that is not optional."""
    assert value is not None
    return value
