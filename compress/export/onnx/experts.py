"""Packed experts of a mixture in an ONNX graph: only those that a token is routed to are dequantised."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from compress.errors import UserError
from compress.export.onnx import codes as onnx_codes
from compress.export.onnx.builder import MICROSOFT, Builder, present
from runtime.formats.packed import PackedWeight

if TYPE_CHECKING:
    import onnx_ir as ir


def replace_experts(graph: "ir.Graph", name: str, packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Gathers packed experts and dequantises only those; False where the graph uses the initialiser in another way.

    packed  (E · N, K), as Weights.packed_experts has it.
    dtype   of the graph's floats.

    Raises UserError for groups, rows or zero points that the operator does not have, and scales that float16 does not.
    """
    from onnx_ir import convenience

    weight = graph.initializers[name]
    uses = list(weight.uses())
    assert weight.shape is not None
    count = int(weight.shape[0])
    if len(uses) != 1 or uses[0].node.op_type != "GatherND" or uses[0].idx != 0:
        return False
    node = uses[0].node
    builder = Builder(graph, name, dtype)
    # The operator has 4 and 8 bits.
    blocks = onnx_codes.to_blocks(name, packed, max(4, onnx_codes.container(packed)))
    if blocks.inputs % blocks.block:
        raise UserError(
            f"{name}: expected rows of a multiple of {blocks.block} inputs, as GatherBlockQuantized has them, found"
            f" {blocks.inputs}: leave the experts out of the recipe's targets"
        )
    if blocks.zeros is not None and blocks.zeros.dtype != torch.uint8:
        raise UserError(f"{name}: expected experts with whole zero points, found others (HQQ): use another method")
    places = builder.node(
        "Squeeze", [present(node.inputs[1]), builder.constant("last_axis", np.array([-1], dtype=np.int64))]
    )
    rows = blocks.outputs // count
    inputs: list[ir.Value | None] = [
        builder.constant("codes", blocks.codes.view(count, rows, -1)),
        places,
        builder.constant("scales", builder.floats(blocks.scales).view(count, rows, -1)),
    ]
    if blocks.zeros is not None:
        inputs.append(builder.constant("zero_points", blocks.zeros.view(count, rows, -1)))
    y = builder.node(
        "GatherBlockQuantized",
        inputs,
        MICROSOFT,
        bits=blocks.bits,
        block_size=blocks.block,
        gather_axis=0,
        quantize_axis=2,
    )
    old = node.outputs[0]
    convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, [old], [y])
    graph.initializers.pop(name)
    return True
