"""A library's product as a layer, and bitsandbytes': its accumulation order is the library's (class `measured`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight

Product = Callable[[Tensor], Tensor]
# Block sizes that bitsandbytes' 4-bit products know.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


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
        """Whose products it runs."""
        return (self.implementation,)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
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


def has_kernel(weight: PackedWeight) -> bool:
    """Whether `bitsandbytes_linear` takes it: nf4 in blocks that fill rows, or int8 rows with inputs per token; without
    zero points or order."""
    if weight.offset is not None or weight.perm is not None or weight.input_scale is not None:
        return False
    kind, group = weight.scheme.kind, weight.scheme.group_size
    if kind == "nf4":
        # Its blocks go on over the ends of rows, ours begin anew with each.
        return weight.nibbles is None and group in _BLOCKS and weight.shape[1] % group == 0
    return kind == "int8" and group == 0


def bitsandbytes_linear(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> LibraryLinear:
    """A layer of nf4 (4-bit product) or int8 (LLM.int8 without outliers) weights; float32 in and out.

    dtype  in which nf4 is computed: one row by the GEMV, more by a product with the weight unpacked to that type.

    Raises ValueError where `has_kernel` says no.
    """
    if not has_kernel(weight):
        raise ValueError(f"bitsandbytes has no kernel for this {weight.scheme.kind} weight")
    product, held = _nf4(weight, dtype) if weight.scheme.kind == "nf4" else _int8(weight)
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
