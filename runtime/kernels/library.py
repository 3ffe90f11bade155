"""bitsandbytes' kernels behind the same call. Their accumulation order is the library's: lossless class `measured`."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.formats.packed import PackedWeight


def has_kernel(weight: PackedWeight) -> bool:
    """Whether `bitsandbytes_linear` takes it: nf4, or int8 rows with inputs per token, without zero points or order."""
    if weight.offset is not None or weight.perm is not None or weight.input_scale is not None:
        return False
    return weight.scheme.kind == "nf4" or (weight.scheme.kind == "int8" and weight.scheme.group_size == 0)


def bitsandbytes_linear(weight: PackedWeight) -> Callable[[Tensor], Tensor]:
    """A layer of nf4 (4-bit product) or int8 (LLM.int8 without outliers) weights; float32 in and out.

    Raises ValueError where `has_kernel` says no.
    """
    if not has_kernel(weight):
        raise ValueError(f"bitsandbytes has no kernel for this {weight.scheme.kind} weight")
    return _nf4(weight) if weight.scheme.kind == "nf4" else _int8(weight)


def _nf4(weight: PackedWeight) -> Callable[[Tensor], Tensor]:
    import bitsandbytes.functional as bnb

    codes = weight.codes.to(torch.uint8)
    packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    state = bnb.QuantState(
        absmax=weight.scale.flatten(),
        shape=torch.Size(weight.shape),
        code=bnb.get_4bit_type("nf4", device=weight.codes.device),
        blocksize=weight.scheme.group_size,
        quant_type="nf4",
        dtype=torch.float32,
    )

    def run(x: Tensor) -> Tensor:
        dense = bnb.dequantize_4bit(packed, state)
        y = x @ dense.t() if x.shape[0] > 1 or not x.is_cuda else bnb.gemv_4bit(x, packed.t(), state=state)
        return y if weight.bias is None else y + weight.bias

    return run


def _int8(weight: PackedWeight) -> Callable[[Tensor], Tensor]:
    import bitsandbytes.functional as bnb

    row_absmax = weight.scale[:, 0] * 127.0

    def run(x: Tensor) -> Tensor:
        codes, absmax, _ = bnb.int8_vectorwise_quant(x.half())
        product = bnb.int8_linear_matmul(codes, weight.codes)
        y = bnb.int8_mm_dequant(product, absmax, row_absmax).float()
        return y if weight.bias is None else y + weight.bias

    return run
