"""Quantisation-aware training: linear layers that compute with what their weights, and inputs, are rounded to.

(Jacob et al. 2017, 1712.05877; the straight-through estimator of straight_through.py.) Weights are packed and unpacked
again in every forward by the format itself, so that what is trained is what the file will hold, to the bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantize.straight_through import blend, round_inputs
from runtime.formats import dequantize, int4, int8
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype


def pack_rounded(weight: Tensor, scheme: Scheme, stored: torch.dtype) -> PackedWeight:
    """A weight (N, K) of any float dtype rounded to nearest, with scales as a model of dtype `stored` holds them.

    Raises ValueError for schemes other than int8 (per token), int4, int3 and int2, and for scales that overflow.
    """
    dtype = stored_scale_dtype(stored)
    if scheme == int8.scheme():
        return int8.pack(weight.detach(), scale_dtype=dtype)
    if scheme.kind != "int4":
        raise ValueError(f"training knows int8 per token and the int4 container, found {scheme}")
    return int4.pack(
        weight.detach(), scheme.group_size, bits=scheme.bits, symmetric=scheme.symmetric, scale_dtype=dtype
    )


class QuantizedLinear(nn.Linear):
    """A linear layer that is trained to be stored quantised.

    scheme       what it will be stored as.
    stored       the dtype of the model that it will be packed for.
    int8_inputs  whether inputs are rounded as kernels do: int8 per token, and for int4 per token and group.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        scheme: Scheme,
        stored: torch.dtype = torch.bfloat16,
        int8_inputs: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__(inputs, outputs, bias=bias, device=device)
        self.scheme, self.stored, self.int8_inputs = scheme, stored, int8_inputs

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        with torch.no_grad():
            rounded = dequantize(self.packed()).to(self.weight.dtype)
        if self.int8_inputs:
            x = round_inputs(x, self.scheme.group_size).to(x.dtype)
        return F.linear(x, blend(self.weight, rounded, 1.0), self.bias)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The layer as its format has it, without its bias, which is a tensor of its own."""
        return pack_rounded(self.weight, self.scheme, self.stored)
