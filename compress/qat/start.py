"""Where training starts: latent weights that round to codes fitted to the layers' inputs (`compress.qat.fit`).

One forward pass over some windows does it: each layer is fitted when its inputs come, which the layers before it have
made with their own codes. A latent weight stands where its code had best been, pushed over to its code's side; the
size of a layer's (or row's) weights is what gives its scale.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.qat.fit import Fitted, fit
from compress.qat.layers import BitLinear, Codes, round_inputs
from runtime.formats import three_of_four

# How far from the border between two codes a weight stands at least, as a share of the way from there to the code.
_MARGIN = 0.2


def tables(codes: Codes) -> tuple[Tensor, bool]:
    """Patterns (P, w) int8 of these codes, and whether each output has its scale. Raises ValueError for binary."""
    if codes == "ternary":
        return torch.tensor([[-1], [0], [1]], dtype=torch.int8), False
    if codes == "ternary-1.25":
        return three_of_four.table(), True
    raise ValueError(f"expected ternary or ternary-1.25, found {codes}")


@torch.no_grad()
def fit_layers(model: Any, windows: Tensor) -> list[str]:
    """Fits the BitLinear layers of a transformers model to windows (B, T) int64; names of those that saw no input."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BitLinear)}
    unseen = dict.fromkeys(layers)

    def arrives(name: str) -> Callable[[BitLinear, tuple[Tensor, ...]], None]:
        def hook(layer: BitLinear, inputs: tuple[Tensor, ...]) -> None:
            # An expert may be called without tokens.
            if inputs[0].numel() and name in unseen:
                del unseen[name]
                rows = round_inputs(inputs[0]).flatten(0, -2)
                fit_layer(layer, rows.T @ rows / len(rows))

        return hook

    handles = [layer.register_forward_pre_hook(arrives(name)) for name, layer in layers.items()]
    try:
        model.base_model(input_ids=windows, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return list(unseen)


@torch.no_grad()
def fit_layer(layer: BitLinear, hessian: Tensor) -> None:
    """Moves a layer's weight to where it rounds to codes fitted to inputs of second moments `hessian` (K, K)."""
    table, per_row = tables(layer.codes)
    fitted = fit(layer.weight, hessian, table, per_row=per_row)
    latent = three_of_four_latents(fitted) if per_row else ternary_latents(fitted)
    layer.weight.copy_(torch.where(fitted.scale > 0, latent, layer.weight))


def three_of_four_latents(fitted: Fitted) -> Tensor:
    """(N, K) float32: what `three_of_four.nearest` makes these codes and scales of.

    A ±1 has the magnitude that is wanted of it, or the margin of its scale where that is less; a 0 is smaller than the
    others of its four. Rows are scaled so that the mean magnitude of their ±1 is the scale. A row of scale 0 is 0.
    """
    codes, k = fitted.codes.float(), fitted.codes.shape[1]
    sizes = (codes * fitted.wanted).clamp(min=0).maximum(_MARGIN * fitted.scale)
    sizes *= codes.abs()
    sizes *= fitted.scale * codes.abs().sum(1, keepdim=True) / sizes.sum(1, keepdim=True).clamp(min=1e-30)
    beyond = F.pad(sizes.masked_fill(codes == 0, torch.inf), (0, -k % 4), value=torch.inf)
    least = beyond.unflatten(1, (-1, 4)).amin(2).repeat_interleave(4, 1)[:, :k] * (1 - _MARGIN)
    return torch.where(codes == 0, fitted.wanted.clamp(-least, least), codes * sizes)


def ternary_latents(fitted: Fitted) -> Tensor:
    """(N, K) float32: what `ternary.pack` makes these codes and this scale of.

    Weights stand where they are wanted, but at least the margin beyond their code's border, which is at half of the
    scale; what ±1 have beyond that is stretched until the mean magnitude is the scale.
    """
    codes, scale, half = fitted.codes.float(), fitted.scale, fitted.scale / 2
    zeros = fitted.wanted.clamp(-(1 - _MARGIN) * half, (1 - _MARGIN) * half) * (codes == 0)
    least = (1 + _MARGIN) * half
    # A thousandth more, so that there is always something to stretch.
    beyond = ((codes * fitted.wanted - least).clamp(min=0) + 1e-3 * scale) * codes.abs()
    missing = scale * codes.numel() - zeros.abs().sum() - least * codes.abs().sum()
    return zeros + codes * (least + beyond * (missing / beyond.sum().clamp(min=1e-30)))
