"""BitLinear: ternary (b1.58, 2402.17764) and binary (BitNet, 2310.11453) weights over int8 inputs, to be trained.

A layer keeps float weights and computes with what they round to; gradients pass the rounding as if it were not there.
Rounding is the packed format's (`runtime.formats.ternary`), stored scale and all, so that the packed layer computes
what the trained one did. Products are made of codes and scaled afterwards, as kernels do. A share λ below 1 stands
between the float layer and the rounded one, for weights and inputs alike: x + λ(q(x) − x).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantize.straight_through import blend, input_steps, pass_through
from runtime.formats import ternary
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import stored_scale_dtype

Codes = Literal["ternary", "binary"]
"""ternary: −1, 0 and 1 (1.58 bits of information); binary: −1 and 1."""


def absmean(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """() float32: the mean magnitude of a weight (N, K), as a file gives it back that holds its inverse in `dtype`.

    It is `ternary.storable` of the mean without its check, which would take the value out of a compiled graph.
    """
    # Summed in float64, as the format does: the codes at the borders depend on the last bit.
    mean = weight.detach().float().abs().mean(dtype=torch.float64)
    inverse = (1.0 / mean.clamp(min=ternary.SMALLEST)).clamp(max=torch.finfo(dtype).max)
    return 1.0 / inverse.to(dtype).float()


def weight_codes(weight: Tensor, scale: Tensor, codes: Codes) -> Tensor:
    """(N, K) float32 codes of a weight (N, K), which times `scale` () is what stands for it.

    ternary: clip(round(W / scale), −1, 1). binary: the sign of W − mean(W), where 0 counts as negative.
    """
    values = weight.detach().float()
    if codes == "ternary":
        return torch.round(values / scale).clamp_(-1, 1)
    centre = values.mean(dtype=torch.float64).float()
    return torch.where(values > centre, 1.0, -1.0)


def bit_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Codes, dtype: torch.dtype, share: float
) -> Tensor:
    """x (…, K) by a weight (N, K) that counts as its codes; (…, N) in the dtype that F.linear gives.

    codes  which ones the weight has.
    dtype  what the weight's scale will be stored in.
    share  λ: 0 is the float layer, 1 the rounded one, whose packed form computes the same but for float rounding.
    """
    scale, step = absmean(weight, dtype), input_steps(x)
    rounded = blend(weight / scale, weight_codes(weight, scale, codes), share)
    products = F.linear(pass_through(x.float() * (1.0 / step), share), rounded)
    y = (products.float() * (step * scale)).to(products.dtype)
    return y if bias is None else y + bias


class BitLinear(nn.Linear):
    """A linear layer that is trained to be stored in two bits a weight.

    codes    ternary or binary.
    stored   the dtype of the model that the layer will be packed for.
    share    λ, which whoever trains raises from 0 to 1 (`convert.set_share`).
    norm     None, or an RMS norm of the inputs (BitNet's SubLN): for models that are trained from scratch as such.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        codes: Codes = "ternary",
        stored: torch.dtype = torch.bfloat16,
        norm: float | None = None,
        device: torch.device | str | None = None,
    ):
        """`norm`: the norm's epsilon; None: no norm."""
        super().__init__(inputs, outputs, bias=bias, device=device)
        self.codes: Codes = codes
        self.stored = stored
        self.share = 1.0
        self.norm = None if norm is None else nn.RMSNorm(inputs, eps=norm, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if self.norm is not None:
            x = self.norm(x)
        return bit_linear(x, self.weight, self.bias, self.codes, stored_scale_dtype(self.stored), self.share)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The layer as its format has it, without its bias, which is a tensor of its own.

        Raises ValueError for a norm, which packed layers do not have, and for weights that are not finite.
        """
        if self.norm is not None:
            raise ValueError("the format's kernels know no norm inside a linear layer: train one without")
        return pack_ternary(self.weight, self.codes, self.stored)


def pack_ternary(weight: Tensor, codes: Codes, stored: torch.dtype) -> PackedWeight:
    """A weight (N, K) of any float dtype in two bits a weight, for a model of dtype `stored`.

    Raises ValueError for a weight that is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight has values that are NaN or infinite")
    scale = absmean(weight, stored_scale_dtype(stored))
    rounded = weight_codes(weight, scale, codes).to(torch.int8)
    rows = scale.reshape(1, 1).expand(len(rounded), 1).contiguous()
    return PackedWeight(ternary.scheme(), rounded, rows)
