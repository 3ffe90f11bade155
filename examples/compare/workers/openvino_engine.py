"""OpenVINO: the stateful graph that optimum-intel exports, compiled for the CPU as it compiles by default."""

from collections import Counter

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from workers.protocol import Description, Options, Tokens, serve

# What stands between a compressed weight and its product.
_DECOMPRESSION = {"Convert", "Multiply", "Subtract", "Reshape", "Transpose"}


class OpenVino:
    """An exported model; keys and values are variables inside the graph."""

    def __init__(self, options: Options):
        core = ov.Core()
        graph = core.read_model(options.model / "openvino_model.xml")
        head = _head(graph)
        self.weight_bytes, self.matrices = _weights(graph)
        _slice_before(graph, head)
        self.compiled = core.compile_model(
            graph, "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": options.threads}
        )
        self.request = self.compiled.create_infer_request()
        self.names = {name for port in self.compiled.inputs for name in port.get_names()}
        self.held = 0

    def describe(self) -> Description:
        """The constants that reach a matrix product, and what the plugin chose."""
        chosen = {"version": ov.get_version(), "matrices": self.matrices}
        return Description(self.weight_bytes, chosen | properties(self.compiled, "DYNAMIC_QUANTIZATION_GROUP_SIZE"))

    def restore(self, context: Tokens, width: int) -> None:
        """Variables cannot be cut short, so the context is read again.

        Its last `width` tokens go through a forward of their own: shapes that repeat are cheaper, as in decoding.
        """
        self.clear()
        parts = (context[:-width], context[-width:]) if width < len(context) else (context,)
        for part in parts:
            self.forward(part, len(part) - 1)

    def clear(self) -> None:
        """Variables as they were made."""
        self.request.reset_state()
        self.held = 0

    def forward(self, tokens: Tokens, logits_from: int) -> NDArray[np.floating]:
        """One inference; only those rows go through the head."""
        count = len(tokens)
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, self.held + count), np.int64),
            "position_ids": np.arange(self.held, self.held + count)[None],
            "beam_idx": np.zeros(1, np.int32),
            "logits_from": np.array([logits_from]),
        }
        self.request.infer({name: value for name, value in inputs.items() if name in self.names}, share_inputs=True)
        self.held += count
        return self.request.get_tensor("logits").data[0]


def properties(compiled: ov.CompiledModel, *further: str) -> dict[str, str]:
    """What the plugin chose: precisions, threads and `further` properties."""
    values = {}
    for key in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", *further, "INFERENCE_NUM_THREADS"):
        value = compiled.get_property(key)
        values[key.lower()] = value.get_type_name() if isinstance(value, ov.Type) else str(value)
    return values


def _head(graph: ov.Model) -> ov.Node:
    """The matrix product whose result is the logits."""
    node = graph.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    return node


def _slice_before(graph: ov.Model, head: ov.Node) -> None:
    """Keeps the rows from a new input, `logits_from` (1,), on: prefill needs the last one only."""
    first = ops.parameter([1], np.int64, name="logits_from")
    first.output(0).set_names({"logits_from"})
    one, end, axis = (ops.constant(np.array([value])) for value in (1, np.iinfo(np.int64).max, 1))
    kept = ops.slice(head.input_value(0), first, end, one, axis)
    head.input(0).replace_source_output(kept.output(0))
    graph.add_parameters([first])
    graph.validate_nodes_and_infer_types()


def _weights(graph: ov.Model) -> tuple[int, str]:
    """Bytes of the constants behind all matrix products, and how many products have weights of which type."""
    read: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for node in graph.get_ops():
        if node.get_type_name() != "MatMul":
            continue
        constants = _constants(node.input_value(1).get_node())
        read |= {constant.get_friendly_name(): constant.get_byte_size() for constant in constants}
        if constants:  # the largest one holds the weights, the others their scales and zero points
            kind = max(constants, key=lambda constant: constant.get_byte_size()).get_element_type().get_type_name()
            kinds[kind] += 1
    return sum(read.values()), ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _constants(node: ov.Node) -> list[ov.Node]:
    """The constants from which a weight is decompressed; empty where the node depends on an input."""
    if node.get_type_name() == "Constant":
        return [node]
    if node.get_type_name() not in _DECOMPRESSION:
        return []
    return [constant for port in node.input_values() for constant in _constants(port.get_node())]


if __name__ == "__main__":
    serve(OpenVino)
