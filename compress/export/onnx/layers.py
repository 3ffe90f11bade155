"""Linear layers of a traced graph as operators over our codes.

    int8, inputs per token   MatMulInteger over inputs that the graph rounds per token, as our kernels do
    int8, static inputs      QuantizeLinear and DequantizeLinear around both factors (QDQ), inputs unsigned
    other integers           MatMulNBits: int8, int6 and int5 (in 8 bits), int4, int3 (in 4 bits), int2, ternary
    nf4                      MatMulBnb4
    experts                  GatherBlockQuantized in place of the gather of float experts

Activation order is a Gather of the inputs. It is imported where the packages of the extra `onnx` are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import convenience
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from compress.errors import UserError
from compress.export.onnx import codes as onnx_codes
from runtime.formats.packed import PackedWeight

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


class Builder:
    """New nodes and initialisers of a graph. Their names begin with the layer's."""

    def __init__(self, graph: ir.Graph, layer: str, dtype: torch.dtype):
        self.graph, self.layer, self.dtype = graph, layer, dtype
        self.nodes: list[ir.Node] = []

    def constant(self, name: str, values: Tensor | np.ndarray) -> ir.Value:
        """An initialiser `layer.name`."""
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

    def node(self, kind: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any) -> ir.Value:
        """A node's only output."""
        name = f"{self.layer}/{kind}_{len(self.nodes)}"
        made = ir.node(kind, list(inputs), attributes=attributes, domain=domain, name=name)
        made.outputs[0].name = f"{name}_output"
        self.nodes.append(made)
        return made.outputs[0]

    def cast(self, x: ir.Value, to: torch.dtype) -> ir.Value:
        """`x` as another dtype."""
        return self.node("Cast", [x], to=int(from_torch_dtype(to)))

    def floats(self, values: Tensor) -> Tensor:
        """Scales as the graph's floats. Raises UserError where float16 overflows or loses one altogether."""
        cast = values.to(self.dtype)
        if self.dtype == torch.float16 and not bool((torch.isfinite(cast) & ((cast != 0) | (values == 0))).all()):
            raise UserError(
                f"{self.layer}: expected scales that float16 holds, found {float(values.abs().min()):.3g} to"
                f" {float(values.abs().max()):.3g}: export to onnx, which has float32"
            )
        return cast


def present(value: ir.Value | None) -> ir.Value:
    """An input that is not optional."""
    assert value is not None
    return value


def replace_experts(graph: ir.Graph, name: str, packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Gathers packed experts and dequantises only those; False where the graph uses the initialiser in another way.

    packed  (E · N, K), as Weights.packed_experts has it.
    dtype   of the graph's floats.

    Raises UserError for groups, rows or zero points that the operator does not have, and scales that float16 does not.
    """
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


# MatMulNBits: sums in float32, and inputs rounded to int8 per block, as our kernels for the same schemes do.
_FLOAT_SUMS, _INT8_INPUTS = 0, 4
# Inputs are unsigned in ONNX Runtime's quick kernels: ours are signed, and this is their 0.
_ZERO = 128


@dataclass(frozen=True)
class Linear:
    """A linear layer's nodes in the graph, `nodes` in order, from `x` to `y`, without its bias.

    bias  the value that is added afterwards where the node adds it itself (Gemm).
    """

    name: str
    nodes: tuple[ir.Node, ...]
    x: ir.Value
    y: ir.Value
    bias: ir.Value | None = None


def find(graph: ir.Graph, name: str) -> Linear | None:
    """The linear layer whose weight is the initialiser `name`; None where it is used otherwise, or more than once."""
    weight = graph.initializers[name]
    uses = list(weight.uses())
    if len(uses) != 1:
        return None
    node, place = uses[0].node, uses[0].idx
    if node.op_type == "Gemm" and place == 1:
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return Linear(name, (node,), present(node.inputs[0]), node.outputs[0], bias)
    if node.op_type == "Transpose":
        transpose, inner = node, list(node.outputs[0].uses())
        if len(inner) == 1 and inner[0].node.op_type == "MatMul" and inner[0].idx == 1:
            node = inner[0].node
            return Linear(name, (transpose, node), present(node.inputs[0]), node.outputs[0])
    return None


def replace(graph: ir.Graph, linear: Linear, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Puts an operator over the codes in place of a layer's float product, whose weight leaves the graph.

    dtype  of the graph's floats. Raises UserError where no operator holds the codes, or float16 the scales.
    """
    layer = linear.name.removesuffix(".weight")
    builder = Builder(graph, layer, dtype)
    x = linear.x
    if packed.perm is not None:
        x = builder.node("Gather", [x, builder.constant("input_order", packed.perm)], axis=-1)
    scheme = packed.scheme
    rows = scheme.kind == "int8" and scheme.group_size == 0 and packed.offset is None
    if scheme.kind == "nf4":
        y = _bnb4(builder, x, packed)
    elif rows and scheme.activation == "int8-token":
        y = _per_token(builder, x, packed)
    elif rows and scheme.activation == "int8-tensor":
        y = _static(builder, x, packed)
    else:
        y = _nbits(builder, x, packed)
    if linear.bias is not None:
        y = builder.node("Add", [y, linear.bias])
    weight, old = graph.initializers[linear.name], list(linear.nodes)
    y.name, linear.y.name = linear.y.name, f"{linear.y.name}.replaced"
    convenience.replace_nodes_and_values(graph, old[-1], old, builder.nodes, [linear.y], [y])
    assert weight.name is not None
    graph.initializers.pop(weight.name)


def _nbits(builder: Builder, x: ir.Value, packed: PackedWeight) -> ir.Value:
    blocks = onnx_codes.to_blocks(builder.layer, packed)
    inputs = [x, builder.constant("codes", blocks.codes), builder.constant("scales", builder.floats(blocks.scales))]
    if blocks.zeros is not None:
        zeros = blocks.zeros if blocks.zeros.dtype == torch.uint8 else blocks.zeros.to(builder.dtype)
        inputs.append(builder.constant("zero_points", zeros))
    # Ternary layers' inputs are rounded, too (per block, ours per token): with floats the operator has no kernel of its
    # own for 2 bits, and a step of the embedded pair's target took 17 times as long.
    floats = packed.scheme.kind != "ternary" and packed.scheme.activation != "int8-group"
    return builder.node(
        "MatMulNBits",
        inputs,
        MICROSOFT,
        K=blocks.inputs,
        N=blocks.outputs,
        bits=blocks.bits,
        block_size=blocks.block,
        accuracy_level=_FLOAT_SUMS if floats else _INT8_INPUTS,
    )


def _bnb4(builder: Builder, x: ir.Value, packed: PackedWeight) -> ir.Value:
    codes, (n, k) = packed.codes.flatten().to(torch.uint8), packed.shape
    absmax = builder.floats(packed.scale.flatten().contiguous())
    inputs = [x, builder.constant("codes", codes[0::2] << 4 | codes[1::2]), builder.constant("absmax", absmax)]
    return builder.node("MatMulBnb4", inputs, MICROSOFT, K=k, N=n, block_size=packed.scheme.group_size, quant_type=1)


def _per_token(builder: Builder, x: ir.Value, packed: PackedWeight) -> ir.Value:
    """y = (q W) · step · scale, q = round(x / step), step = max |x| / 127 of each row; the product is exact int32."""
    half = builder.dtype != torch.float32
    x = builder.cast(x, torch.float32) if half else x
    last = builder.constant("last_axis", np.array([-1], dtype=np.int64))
    most = builder.node("ReduceMax", [builder.node("Abs", [x]), last], keepdims=1)
    # A row of zeros has codes of 0 whatever it is divided by.
    least = builder.constant("least_step", np.array(np.finfo(np.float32).tiny, dtype=np.float32))
    limit = builder.constant("code_limit", np.array(127, dtype=np.float32))
    step = builder.node("Max", [builder.node("Div", [most, limit]), least])
    shift = builder.constant("code_shift", np.array(_ZERO, dtype=np.float32))
    rounded = builder.node("Add", [builder.node("Round", [builder.node("Div", [x, step])]), shift])
    zero = builder.constant("code_zero", np.array(_ZERO, dtype=np.uint8))
    codes, code_zeros = _unsigned(builder, packed)
    product = builder.node("MatMulInteger", [builder.cast(rounded, torch.uint8), codes, zero, code_zeros])
    scaled = builder.node("Mul", [builder.cast(product, torch.float32), builder.constant("scales", packed.scale[:, 0])])
    y = builder.node("Mul", [scaled, step])
    return builder.cast(y, builder.dtype) if half else y


def _static(builder: Builder, x: ir.Value, packed: PackedWeight) -> ir.Value:
    """QDQ: both factors as DequantizeLinear of integers, which engines fuse into an integer product."""
    assert packed.input_scale is not None
    step = builder.constant("input_scale", builder.floats(packed.input_scale.reshape(())))
    zero = builder.constant("input_zero_point", np.array(_ZERO, dtype=np.uint8))
    rounded = builder.node("DequantizeLinear", [builder.node("QuantizeLinear", [x, step, zero]), step, zero])
    codes, code_zeros = _unsigned(builder, packed)
    scale = builder.constant("scales", builder.floats(packed.scale[:, 0]))
    return builder.node("MatMul", [rounded, builder.node("DequantizeLinear", [codes, scale, code_zeros], axis=1)])


def _unsigned(builder: Builder, packed: PackedWeight) -> tuple[ir.Value, ir.Value]:
    """int8 codes (K, N) as uint8 about 128, and the zero point of each output.

    ONNX Runtime's product of unsigned inputs and signed weights adds pairs in 16 bits, which saturate on x86 processors
    without VNNI; its product of two unsigned factors is exact on all of them.
    """
    codes = (packed.codes.T.to(torch.int16) + _ZERO).to(torch.uint8)
    zeros = np.full(packed.shape[0], _ZERO, dtype=np.uint8)
    return builder.constant("codes", codes), builder.constant("code_zeros", zeros)
