"""BitLinear: ternary (b1.58, 2402.17764) and binary (BitNet, 2310.11453) weights over int8 inputs, to be trained.

A layer keeps float weights and computes with what they round to; gradients pass the rounding as if it were not there.
Rounding is the packed format's (`runtime.formats.ternary`, `three_of_four`), stored scale and all, so that the packed
layer computes what the trained one did. Products are made of codes and scaled afterwards, as kernels do. A share λ
below 1 stands between the float layer and the rounded one, for weights and inputs alike: x + λ(q(x) − x).
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.formats import dequantize, int4, int8, ternary, three_of_four
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype

# Largest code of an input.
LIMIT = 127


def blend(value: Tensor, rounded: Tensor, share: float) -> Tensor:
    """value + λ(rounded − value) for the share λ, in `rounded`'s very bits at λ = 1.

    Both of one shape and dtype. The gradient goes to `value` alone, whole, whatever λ is.
    """
    blended: Tensor = _Blend.apply(value, rounded, share)  # type: ignore[no-untyped-call]
    return blended


class _Blend(torch.autograd.Function):
    """A sum with a detached term would do, but for its last bits: w + (q − w) is not q."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor, share: float) -> Tensor:
        # A function must not hand back its input itself.
        return rounded.view_as(rounded) if share == 1 else torch.lerp(value, rounded, share)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0], None, None


def pass_through(value: Tensor, share: float = 1.0) -> Tensor:
    """Whole numbers nearest to `value`, or the `share` of the way there."""
    return blend(value, torch.round(value.detach()), share)


def input_steps(x: Tensor) -> Tensor:
    """(…, 1) float32: absmax / 127 of each row of x (…, K); codes are round(x · (1 / step)), as kernels have it.

    1 for a row of zeros (or of subnormal numbers), whose codes are 0 by any step.
    """
    step = x.detach().float().abs().amax(dim=-1, keepdim=True) / LIMIT
    return torch.where(step >= torch.finfo(torch.float32).tiny, step, 1.0)


def round_inputs(x: Tensor, group_size: int = 0) -> Tensor:
    """(…, K) float32: what kernels make of x, int8 with a step for each token and `group_size` inputs (0: for a token).

    Raises ValueError where groups do not divide K.
    """
    width = group_size or x.shape[-1]
    if x.shape[-1] % width:
        raise ValueError(f"groups of {width} do not divide {x.shape[-1]} inputs")
    grouped = x.float().unflatten(-1, (-1, width))
    step = input_steps(grouped)
    return (pass_through(grouped * (1.0 / step)) * step).flatten(-2)


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


Codes = Literal["ternary", "ternary-1.25", "binary"]
"""ternary: −1, 0 and 1 (1.58 bits of information); ternary-1.25: of every four exactly one 0; binary: −1 and 1."""


def absmean(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """() float32: the mean magnitude of a weight (N, K), as a file gives it back that holds its inverse in `dtype`.

    It is `ternary.storable` of the mean without its check, which would take the value out of a compiled graph.
    """
    # Summed in float64, as the format does: the codes at the borders depend on the last bit.
    mean = weight.detach().float().abs().mean(dtype=torch.float64)
    inverse = (1.0 / mean.clamp(min=ternary.SMALLEST)).clamp(max=torch.finfo(dtype).max)
    return 1.0 / inverse.to(dtype).float()


def rounded_codes(weight: Tensor, codes: Codes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, K) float32 codes of a weight (N, K), and the scales () or (N, 1) by which they stand for it, held in `dtype`.

    ternary: clip(round(W / scale), −1, 1). ternary-1.25: `three_of_four.nearest`, a scale a row. binary: the sign of
    W − mean(W), where 0 counts as negative.
    """
    values = weight.detach().float()
    if codes == "ternary-1.25":
        three, size = three_of_four.nearest(values)
        # `round_scale` without its check, which would take the value out of a compiled graph.
        stored = size.to(dtype).float()
        return three.float(), torch.where(stored == 0, torch.finfo(dtype).eps, stored)
    scale = absmean(weight, dtype)
    if codes == "ternary":
        return torch.round(values / scale).clamp_(-1, 1), scale
    centre = values.mean(dtype=torch.float64).float()
    return torch.where(values > centre, 1.0, -1.0), scale


def gained(scale: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 1) float32: scale (1 + gain) of scales and gains (N, 1) as a file holds it in `dtype`.

    The gradient goes to `gain` as if nothing were rounded.
    """
    wanted = scale * (1 + gain)
    stored = wanted.detach().to(dtype).float()
    return blend(wanted, torch.where(stored == 0, torch.finfo(dtype).eps, stored), 1.0)


def bit_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Codes,
    dtype: torch.dtype,
    share: float,
    gain: Tensor | None = None,
) -> Tensor:
    """x (…, K) by a weight (N, K) that counts as its codes; (…, N) in the dtype that F.linear gives.

    codes  which ones the weight has.
    dtype  what the weight's scale will be stored in.
    share  λ: 0 is the float layer, 1 the rounded one, whose packed form computes the same but for float rounding.
    gain   (N, 1): what the outputs' scales are raised by, as shares (`gained`). None: nothing.
    """
    (found, scale), step = rounded_codes(weight, codes, dtype), input_steps(x)
    rounded = blend(weight / scale, found, share)
    products = F.linear(pass_through(x.float() * (1.0 / step), share), rounded)
    if gain is not None:
        scale = gained(scale, gain, dtype)
    y = (products.float() * (step * scale.flatten())).to(products.dtype)
    return y if bias is None else y + bias


class BitLinear(nn.Linear):
    """A linear layer that is trained to be stored in two bits a weight, or in 1.25.

    codes    ternary, ternary-1.25 or binary.
    stored   the dtype of the model that the layer will be packed for.
    share    λ, which whoever trains raises from 0 to 1 (`convert.set_share`).
    gains    ternary-1.25: whether scales are trained beside the weights, by a parameter `gain` (N, 1), 0 at first.
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
        gains: bool = False,
        norm: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(inputs, outputs, bias=bias, device=device)
        if gains and codes != "ternary-1.25":
            raise ValueError(f"only ternary-1.25 has a scale for each output to train, found {codes}")
        self.codes: Codes = codes
        self.stored = stored
        self.share = 1.0
        self.gain = nn.Parameter(torch.zeros(outputs, 1, device=device)) if gains else None
        self.norm = None if norm is None else nn.RMSNorm(inputs, eps=norm, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        if self.norm is not None:
            x = self.norm(x)
        dtype = stored_scale_dtype(self.stored)
        return bit_linear(x, self.weight, self.bias, self.codes, dtype, self.share, self.gain)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The layer as its format has it, without its bias, which is a tensor of its own.

        Raises ValueError for a norm, which packed layers do not have, and for weights that are not finite.
        """
        if self.norm is not None:
            raise ValueError("the format's kernels know no norm inside a linear layer: train one without")
        return pack_ternary(self.weight, self.codes, self.stored, self.gain)


def pack_ternary(weight: Tensor, codes: Codes, stored: torch.dtype, gain: Tensor | None = None) -> PackedWeight:
    """A weight (N, K) of any float dtype in two bits a weight, or in 1.25, for a model of dtype `stored`.

    `gain` as `bit_linear` has it. Raises ValueError for a weight or a gain that is not finite.
    """
    if not bool(torch.isfinite(weight).all()) or not (gain is None or bool(torch.isfinite(gain).all())):
        raise ValueError("the weight has values that are NaN or infinite")
    dtype = stored_scale_dtype(stored)
    rounded, scale = rounded_codes(weight, codes, dtype)
    if gain is not None:
        scale = gained(scale, gain, dtype).detach()
    rows = scale.reshape(-1, 1).expand(len(rounded), 1).contiguous()
    scheme = three_of_four.scheme() if codes == "ternary-1.25" else ternary.scheme()
    return PackedWeight(scheme, rounded.to(torch.int8), rows)
