"""Rounding of inputs for packed weights: `reference.quantize_rows` and `quantize_static`, bit for bit, and fused forms.

What comes before the rounding in its kernel is the reference's too (silu and gelu bit for bit; an RMSNorm adds its
squares in an order of its own, the same at every width).
"""

from dataclasses import dataclass
from operator import attrgetter

import torch
import triton
from torch import Tensor

from runtime.kernels.triton import tile_sizes
from runtime.kernels.triton.elementwise import Activation
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.quantize_kernels import round_groups, round_rows
from runtime.kernels.triton.weight_layout import Cut
from runtime.kernels.triton.weights import GpuWeight

# Elements of a program's block of groups.
_TILE = 2048
# Inputs of a row that a program looks at at once: where the row has one step, and where it is cut into groups.
_ROW, _BLOCK = 16384, 4096
# Inputs of a thread.
_EACH = 16
# One IEEE operation each: a contracted multiply and add would have other bits than the reference.
OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True, eq=False)
class Rounding:
    """How a weight wants its inputs: cut, order (K,) int32 or None, static step (1,) or None, sums by group or not."""

    cut: Cut
    perm: Tensor | None
    static: Tensor | None
    sums: bool

    def serves(self, other: "Rounding") -> bool:
        """Whether inputs rounded so are what `other` asks for."""
        sizes = attrgetter("inputs", "group", "padded", "columns")
        same = sizes(self.cut) == sizes(other.cut)
        return same and self.perm is other.perm and self.static is other.static and (self.sums or not other.sums)


@dataclass(frozen=True, eq=False)
class Rounded:
    """Rounded inputs of T rows: x ≈ codes · step.

    codes  (T, cut.stored) int8, in the kernels' order.
    step   (T, cut.columns) float32; NaN where a group holds one.
    sums   (T, cut.columns) int32 sums of the codes, or None.
    """

    how: Rounding
    codes: Tensor
    step: Tensor
    sums: Tensor | None


def rounding(*weights: GpuWeight) -> Rounding | None:
    """How these weights want the input that they share; None where one rounding does not serve all of them."""
    found = [
        Rounding(w.cut, w.perm, w.input_scale, any(other.offset is not None for other in weights))
        for w in weights
        if w.cut is not None
    ]
    whole = len(found) == len(weights) and all(found[0].serves(other) for other in found)
    return found[0] if whole else None


def quantize(x: Tensor, how: Rounding, picks: Picks | None = None) -> Rounded:
    """x (T, K) float32, rounded; (pairs, K) where there are picks: x's rows or pairs, each as its expert wants it."""
    return _round(x, how, "plain", picks=picks)


def norm_quantize(x: Tensor, weight: Tensor, eps: float, how: Rounding, offset: float = 0.0) -> Rounded:
    """RMSNorm of x (T, K) float32 times offset + weight (K,), rounded."""
    return _round(x, how, "norm", weight=weight, eps=eps, shift=offset)


def gated_quantize(
    gate: Tensor, up: Tensor, activation: Activation, how: Rounding, picks: Picks | None = None
) -> Rounded:
    """activation(gate) · up, each (T, K) float32 with rows of stride 1 (halves of one product as they are), rounded.

    picks  the T rows are pairs, each rounded as its expert wants it.
    """
    return _round(gate, how, activation, up, picks=picks)


def _round(
    x: Tensor,
    how: Rounding,
    mode: str,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    shift: float = 0.0,
    picks: Picks | None = None,
) -> Rounded:
    cut, rows = how.cut, x.shape[0] if picks is None else picks.pairs
    x = _rows(x, cut.inputs)
    y = None if y is None else _rows(y, cut.inputs)
    codes = torch.empty((rows, cut.stored), dtype=torch.int8, device=x.device)
    step = torch.empty((rows, cut.columns), device=x.device)
    sums = torch.empty((rows, cut.columns), dtype=torch.int32, device=x.device) if how.sums else None
    if rows == 0:
        return Rounded(how, codes, step, sums)
    block = min(triton.next_power_of_2(cut.stored), _ROW if cut.columns == 1 else _BLOCK)
    at_once = tile_sizes.rows_at_once(x.device)
    blocks = triton.cdiv(rows, at_once)
    source = (x, y, weight, x.stride(0), 0 if y is None else y.stride(0), eps, shift)
    experts = None if picks is None else picks.experts
    common = (source, (how.perm, how.static), codes, step, sums, experts, rows, cut.inputs, cut.stored)
    constants = {"MODE": mode, "ROWS": at_once, "BLOCK": block, "COUNT": rows // x.shape[0], **OPTIONS}
    if cut.columns == 1:
        warps = max(4, min(16, block // (32 * _EACH)))
        round_rows[(blocks,)](*common, **constants, ONCE=block >= cut.stored, num_warps=warps)
        return Rounded(how, codes, step, sums)
    inside = triton.next_power_of_2(cut.padded)
    groups = min(triton.next_power_of_2(cut.columns), max(1, _TILE // inside))
    round_groups[(blocks, triton.cdiv(cut.columns, groups))](
        *common, cut.group, cut.padded, cut.columns, GROUPS=groups, INSIDE=inside, **constants, num_warps=4
    )
    return Rounded(how, codes, step, sums)


def _rows(x: Tensor, inputs: int) -> Tensor:
    if x.ndim != 2 or x.shape[1] != inputs or x.dtype != torch.float32:
        raise ValueError(f"this layer takes (T, {inputs}) float32, found {x.dtype} {list(x.shape)}")
    return x if x.stride(1) == 1 or inputs == 1 else x.contiguous()
