"""Keys and values in a basis of their head: into it before they are rounded, and how rounding goes in it.

A key is stored as k · `into`, a value likewise; a query meets it as q · `back`, and what attention mixes of the values
comes back as mixed · `back`. So scores and outputs are what they would be, but for rounding. A basis turns a head's
dimensions into each other, so that none of them stands out, and gives those that matter less a coarser step
(compress/quantize/cache_basis.py makes it).

Codes are found from the last to the first, and each makes up for the errors of those behind it, as in GPTQ
(2210.17323): with t the row over its scale and c the codes,
c[i] = round(t[i] + Σ_{j > i} (t[j] − c[j]) · feedback[j, i]). A scale has a sign: the row's extreme lies on the side
that has a code more. Every sum goes first to last in float32 without fused products, so native/basis.cpp has the same
bits.
"""

import torch
from torch import Tensor

INTO, FEEDBACK, BACK = 0, 1, 2


def turned(x: Tensor, matrices: Tensor) -> Tensor:
    """x · matrix of rows (n, heads, d) float32 by (kv_heads, d, d), each for heads / kv_heads adjacent heads."""
    per_head = matrices.repeat_interleave(x.shape[1] // len(matrices), dim=0)
    out = torch.zeros_like(x)
    for j in range(x.shape[-1]):
        out = out + x[..., j : j + 1] * per_head[:, j]
    return out


def round_signed(x: Tensor, signed: tuple[float, int], basis: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes (n, heads, d) int8 of rows x (n, heads, d) float32, and their scales (n, heads), which may be negative.

    signed  what the extreme of a row is of its scale, and the number of codes below 0 (kv_store.SIGNED).
    basis   (heads, 3, d, d) float32, or None: x as it is.

    A row of zeros has scale 0; one with a NaN has the scale NaN and codes 0.
    """
    limit, half = signed
    x = x if basis is None else turned(x, basis[:, INTO])
    highest, lowest = x.amax(-1).clamp_min(0.0), x.amin(-1).clamp_max(0.0)
    scale = torch.where(highest >= -lowest, highest, lowest) / limit
    inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
    # A subnormal scale has an infinite inverse: such a row is zero for every purpose.
    inverse = torch.where(torch.isinf(inverse), torch.zeros_like(inverse), inverse)
    open_, bottom, top = x * inverse.unsqueeze(-1), float(-half), float(half - 1)
    if basis is None:
        return open_.round().clamp(bottom, top).nan_to_num(0.0).to(torch.int8), scale
    left, codes = open_.clone(), torch.empty_like(open_)
    for i in reversed(range(x.shape[-1])):
        codes[..., i] = left[..., i].round().clamp(bottom, top).nan_to_num(0.0)
        lost = open_[..., i] - codes[..., i]
        left[..., :i] += lost.unsqueeze(-1) * basis[:, FEEDBACK, i, :i]
    return codes.to(torch.int8), scale
