"""torch's own products as layers: tinygemm's int4, fp8 with fp8, dense floats. None promises bits at every width.

On CUDA by the operators for GPUs; on a CPU by those of the same meaning that torch has there, which is what tests run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.formats import fp8
from runtime.formats.packed import PackedWeight

Product = Callable[[Tensor], Tensor]
# Block sizes that bitsandbytes' 4-bit products know.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Of torch's int4 product: groups that it knows, and how many tiles of 16 inputs a thread unpacks.
_INT4_GROUPS = (32, 64, 128, 256)
_INNER_TILES = 8
# Outputs come in so many: of the int4 product on CUDA (a CPU's layout takes 16), and of fp8's, as its inputs.
_INT4_OUTPUTS = {"cuda": 8, "cpu": 16}
_FP8_ALIGNED = 16


@dataclass(frozen=True, eq=False)
class LibraryLinear:
    """y (T, N) = x (T, K) Wᵀ (+ b), float32 in and out, by a library's product.

    implementation  whose it is; tensors: all that it holds; product: x as the weight's columns lie, no bias, any float
                    type out.
    """

    implementation: str
    product: Product
    tensors: tuple[Tensor, ...]
    perm: Tensor | None = None
    bias: Tensor | None = None

    @property
    def libraries(self) -> tuple[str, ...]:
        return (self.implementation,)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x if self.perm is None else x[:, self.perm]).float()
        return y if self.bias is None else y + self.bias


def library_linear(
    implementation: str, product: Product, held: tuple[Tensor, ...], weight: PackedWeight
) -> LibraryLinear:
    """The layer of a packed weight's product; `held` is what the product reads. Order and bias are the weight's."""
    more = tuple(tensor for tensor in (weight.perm, weight.bias) if tensor is not None)
    return LibraryLinear(implementation, product, held + more, weight.perm, weight.bias)


def bitsandbytes_linear(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> LibraryLinear | None:
    """A layer of nf4 (4-bit product) or int8 (LLM.int8 without outliers) weights; float32 in and out.

    dtype  in which nf4 is computed: one row by the GEMV, more by a product with the weight unpacked to that type.

    None for other weights than nf4 in blocks that fill rows, or int8 rows with inputs per token; and for zero points
    and order.
    """
    kind, group = weight.scheme.kind, weight.scheme.group_size
    if weight.offset is not None or weight.perm is not None or weight.input_scale is not None:
        return None
    # Its blocks go on over the ends of rows, ours begin anew with each.
    if kind == "nf4" and weight.nibbles is None and group in _BLOCKS and weight.shape[1] % group == 0:
        product, held = _nf4(weight, dtype)
    elif kind == "int8" and group == 0:
        product, held = _int8(weight)
    else:
        return None
    return library_linear("bitsandbytes", product, held, weight)


def _nf4(weight: PackedWeight, dtype: torch.dtype) -> tuple[Product, tuple[Tensor, ...]]:
    import bitsandbytes.functional as bnb

    codes = weight.codes.to(torch.uint8)
    packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    state = bnb.QuantState(
        absmax=weight.scale.flatten(),
        shape=torch.Size(weight.shape),
        code=bnb.get_4bit_type("nf4", device=weight.codes.device),
        blocksize=weight.scheme.group_size,
        quant_type="nf4",
        dtype=dtype,
    )

    def product(x: Tensor) -> Tensor:
        x = x.to(dtype)
        if x.is_cuda and x.shape[0] == 1:
            return bnb.gemv_4bit(x, packed.t(), state=state)
        return x @ bnb.dequantize_4bit(packed, state).t()

    return product, (packed, state.absmax)


def _int8(weight: PackedWeight) -> tuple[Product, tuple[Tensor, ...]]:
    import bitsandbytes.functional as bnb

    row_absmax = weight.scale[:, 0] * 127.0

    def product(x: Tensor) -> Tensor:
        codes, absmax, _ = bnb.int8_vectorwise_quant(x.half())
        return bnb.int8_mm_dequant(bnb.int8_linear_matmul(codes, weight.codes), absmax, row_absmax)

    return product, (weight.codes, row_absmax)


def int4_linear(weight: PackedWeight) -> LibraryLinear | None:
    """A layer of int4 weights in groups, inputs and scales in bfloat16, sums in float32.

    None for other weights than int4 in groups of 32, 64, 128 or 256 inputs that fill rows of 128s, outputs in eights.
    """
    (outputs, inputs), group = weight.shape, weight.scheme.group_size
    if weight.scheme.kind != "int4" or weight.nibbles is not None or weight.input_scale is not None:
        return None
    whole = group in _INT4_GROUPS and inputs % group == 0 and inputs % (16 * _INNER_TILES) == 0
    if not whole or outputs % _INT4_OUTPUTS[weight.codes.device.type]:
        return None
    # torch's weight is (q − 8) · scale + zero with q in 0..15; ours q · scale − offset, q from −8 or from 0.
    signed = int(weight.codes.min()) < 0
    codes = weight.codes + 8 if signed else weight.codes
    zero = torch.zeros_like(weight.scale) if signed else 8.0 * weight.scale
    if weight.offset is not None:
        zero = zero - weight.offset
    both = torch.stack((weight.scale.t(), zero.t()), dim=2).to(torch.bfloat16).contiguous()
    product = torch._weight_int4pack_mm
    if codes.is_cuda:
        codes = codes.to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(codes[:, 0::2] << 4 | codes[:, 1::2], _INNER_TILES)
    else:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), _INNER_TILES)
        product = torch._weight_int4pack_mm_for_cpu

    def run(x: Tensor) -> Tensor:
        return product(x.to(torch.bfloat16).contiguous(), packed, group, both)

    return library_linear("torch-int4", run, (packed, both), weight)


def scaled_linear(weight: PackedWeight) -> LibraryLinear | None:
    """A layer of fp8 weights whose inputs are rounded to fp8 as well, by their largest in each row; out in bfloat16.

    So the result is another than the reference's, which leaves inputs as they are. None for other weights than fp8
    whose outputs and inputs are multiples of 16.
    """
    plain = weight.scheme.kind == "fp8" and weight.offset is None and weight.perm is None
    if not plain or any(size % _FP8_ALIGNED for size in weight.shape):
        return None
    codes, scale = weight.codes.contiguous(), weight.scale.t().contiguous()

    def run(x: Tensor) -> Tensor:
        rounded, step = fp8_rows(x)
        # Scales by row have results in bfloat16 only, in most of torch's versions.
        return torch._scaled_mm(rounded, codes.t(), scale_a=step, scale_b=scale, out_dtype=torch.bfloat16)

    return library_linear("torch-scaled-mm", run, (codes, scale), weight)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, K) float32 as E4M3 codes (T, K) and a step a row (T, 1) float32: x ≈ codes · step. A NaN stays one."""
    step = x.abs().amax(dim=1, keepdim=True) / fp8.LIMIT
    step = torch.where(step == 0, torch.ones_like(step), step)
    return (x / step).clamp(-fp8.LIMIT, fp8.LIMIT).to(fp8.DTYPE), step


def dense_linear(weight: Tensor, bias: Tensor | None) -> LibraryLinear:
    """A layer of a float weight (N, K) by torch's matmul in the weight's type; out in that type."""
    weight = weight.contiguous()

    def run(x: Tensor) -> Tensor:
        return x.to(weight.dtype) @ weight.t()

    held = (weight,) if bias is None else (weight, bias)
    return LibraryLinear("torch", run, held, bias=None if bias is None else bias.float())
