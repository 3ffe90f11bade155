"""Sequences of a trellis that make up for each other's rounding, given the second moments of a layer's inputs.

The objective is that of gptq.py, tr(E H Eᵀ) with H = M D Mᵀ, and so is the rule: what the columns before have left is
added to each column's target (LDLQ; QTIP, 2406.11235, applies it to a trellis). Sixteen columns at a time are encoded,
by Viterbi's algorithm; inside of them each survivor carries its own errors on (runtime/native/trellis_encode.cpp).

Then every column of tiles is encoded again, given all others as they are (`_again`), as refine.py does with codes: what
gptq.py fixed before it knew the later columns can change. A tile whose error would grow keeps its sequence.

In the code the names are those of gptq.py: columns = Wᵀ (K, N), error = Eᵀ, factor = M, spreads = D.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.gptq import Rounded, factorize, output_energy
from compress.quantize.grid import expect_finite
from compress.quantize.refine import BLOCK, spans
from runtime.devices import torch_threads
from runtime.formats.packed import PackedWeight, Tiles
from runtime.formats.trellis import LEVELS, TILE, empty_tiles, row_scale, scheme, stored_scale
from runtime.native.trellis import encode_tiles

# Sizes of levels over that of the weights, of which the best is taken, by so many tiles of outputs. The usual ones are
# tried first, and the others while an outer one is best.
_REACHES = (1.0, 1.1, 1.2, 1.3, 1.45)
_USUAL = (1, 2)
_JUDGES = 8
# Passes over all columns once they are encoded. A third one takes 6 % of a run's time and 0.4 % of the error, which is
# for those who want the most bits (KL of the built-in pair at 4 bits: 0.00467, with it 0.00458).
PASSES = {2: 2, 3: 2, 4: 3}
# How far a channel's factor may go from the others' middle: e to the power of this.
_FARTHEST = 5.0


@dataclass
class _State:
    """A layer under way; its tensors are changed in place.

    columns  (K, N) float32, never changed; error (K, N): `columns` less what the sequences are read back as.
    found    (K, N) int8: their levels.   tiles  as files have them.   levels  (128,) int8.   scale  (N,) float32.
    threads  on which tiles are encoded.
    """

    bits: int
    columns: Tensor
    error: Tensor
    found: Tensor
    tiles: Tensor
    levels: Tensor
    scale: Tensor
    threads: int

    def encode(self, number: int, carried: Tensor, corner: Tensor, spreads: Tensor, again: bool = False) -> None:
        """Tile column `number`; `carried` (C, N) is added to its weights. `again`: see encode_tiles."""
        here = slice(number * TILE, (number + 1) * TILE)
        given = (self.levels, self.columns[here], carried, self.scale, corner, spreads)
        there = (self.tiles[:, number], self.found[here])
        encode_tiles(self.bits, *given, *there, again=again, threads=self.threads)
        torch.addcmul(self.columns[here], self.found[here].float(), self.scale, value=-1, out=self.error[here])


@dataclass(frozen=True)
class _Corner:
    """What the inputs of one tile column have of H among themselves, B = their part of H and the ridge = M D Mᵀ.

    part  B (C, C).   factor  M.   spreads  D (C,).   solve  D⁻¹ M⁻¹.
    """

    part: Tensor
    factor: Tensor
    spreads: Tensor
    solve: Tensor


def quantize_together(
    weights: Sequence[Tensor],
    hessian: Tensor,
    bits: int,
    dtype: torch.dtype,
    damping: float = 0.01,
    passes: int | None = None,
) -> list[Rounded]:
    """Sequences of layers that read the same inputs, (N, K) each; H is factored once, and every layer is as if alone.

    hessian  (K, K) float32, symmetric: the mean of x xᵀ. It is only read.
    dtype    what scales are stored in.
    damping  is raised tenfold until H can be factored.
    passes   over all columns afterwards; None: what suits the bits.

    Raises ValueError for values that are not finite, shapes that do not fit, scales that overflow `dtype`, or an H that
    is not a Gram matrix; UserError where the native library is missing.
    """
    k = hessian.shape[0]
    if hessian.shape != (k, k) or any(weight.ndim != 2 or weight.shape[1] != k for weight in weights):
        raise ValueError(f"weights {[list(w.shape) for w in weights]} do not fit a Hessian {list(hessian.shape)}")
    for name, tensor in (*(("the weight", weight) for weight in weights), ("the Hessian", hessian)):
        expect_finite(name, tensor)
    passes = PASSES[bits] if passes is None else passes
    factor, spreads, ridge = factorize(hessian, None, damping)
    corners = _corners(hessian, ridge) if passes else []
    return [_quantize(weight, hessian, bits, dtype, factor, spreads, ridge, corners, passes) for weight in weights]


def quantize_apart(weight: Tensor, importance: Tensor, bits: int, dtype: torch.dtype) -> Rounded:
    """Sequences of a layer (N, K) whose inputs make up for none of each other's rounding: no feedback, no passes.

    importance  (K,) positive: how much each input's squared error counts, H's diagonal where that is all of it.

    Raises as `quantize_together` does.
    """
    expect_finite("the weight", weight)
    alone = torch.eye(len(importance))
    return _quantize(weight, importance.diag(), bits, dtype, alone, importance, 0.0, [], 0)


def _corners(hessian: Tensor, ridge: float) -> list[_Corner]:
    """Of each tile column."""
    found = []
    for first, last in spans(0, len(hessian), TILE):
        part = hessian[first:last, first:last].clone()
        part.diagonal().add_(ridge)
        factor, spreads, _ = factorize(part, None, 0.0)
        solve = torch.linalg.solve_triangular(factor, torch.eye(len(part)), upper=True, unitriangular=True)
        found.append(_Corner(part, factor, spreads, solve / spreads.unsqueeze(1)))
    return found


def _quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    dtype: torch.dtype,
    factor: Tensor,
    spreads: Tensor,
    ridge: float,
    corners: Sequence[_Corner],
    passes: int,
) -> Rounded:
    columns = weight.float().T.contiguous()
    state = _start(columns, bits, _reach(columns, factor, spreads, bits, dtype))
    product = _feed_back(state, factor, spreads)
    # H + ridge = M D Mᵀ, from the top down: what a block of rows is made of are those from itself on.
    product.mul_(spreads.unsqueeze(1))
    for start, stop in spans(0, len(columns), 4 * BLOCK):
        product[start:stop] = factor[start:stop, start:] @ product[start:]
    for _ in range(passes):
        _again(state, product, hessian, ridge, corners)
    whole, lost = _refit(state, product, hessian, ridge, dtype)
    packed = PackedWeight(
        scheme(bits),
        state.found.T.contiguous(),
        state.scale.unsqueeze(1),
        tiles=Tiles(state.tiles, state.levels.clone()),
    )
    error = math.sqrt(max(lost, 0.0) / whole) if whole > 0 else 0.0
    return Rounded(packed, error, ridge / (float(hessian.diagonal().mean()) or 1.0))


def channel_factors(weights: Sequence[Tensor], tie: Callable[[Tensor], Tensor]) -> Tensor:
    """Factors (K,) float32 that give the weights (N, K) of every input one size: a trellis is made for numbers alike.

    Weights are to be multiplied by them, and inputs divided. (To weigh columns by what they count instead, as AWQ does,
    made errors larger on the pair: the sizes of a row's weights then differ more.)

    tie  makes a statistic (K,) equal for channels that must share a factor. An input without weights has factor 1.
    """
    squares = tie(torch.stack([weight.float().square().sum(dim=0) for weight in weights]).sum(dim=0))
    exponents = -squares.log() / 2
    usable = torch.isfinite(exponents)
    if not bool(usable.any()):
        return torch.ones_like(exponents)
    middle = exponents[usable].mean()
    return torch.where(usable, (exponents - middle).clamp(-_FARTHEST, _FARTHEST), 0.0).exp()


def _reach(columns: Tensor, factor: Tensor, spreads: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """(N,) scales: levels of the weights' size times what suits some outputs of the layer best.

    Above 1, because what earlier columns leave makes targets larger than the weights, and what lies beyond the largest
    level is clipped.
    """
    n, scale = columns.shape[1], row_scale(columns, LEVELS[bits], dtype)
    tiles = -(-n // TILE)
    judges = range(0, tiles, -(-tiles // _JUDGES))
    some = [min(tile * TILE + i, n - 1) for tile in judges for i in range(TILE)]
    losses: dict[int, float] = {}
    asked: tuple[int, ...] = _USUAL
    best = asked[0]
    while asked:
        # All sizes side by side, as if they were more outputs; whole tiles, so that none has outputs of two sizes.
        scales = torch.cat([stored_scale(scale[some] * _REACHES[i], dtype) for i in asked])
        state = _start(columns[:, some].repeat(1, len(asked)), bits, scales)
        left = _feed_back(state, factor, spreads)
        lost = (left.square_() * spreads.unsqueeze(1)).sum(dim=0).view(len(asked), -1).sum(dim=1)
        losses |= zip(asked, lost.tolist(), strict=True)
        best = min(losses, key=losses.__getitem__)
        asked = tuple(i for i in (best - 1, best + 1) if 0 <= i < len(_REACHES) and i not in losses)
    return stored_scale(scale * _REACHES[best], dtype)


def _start(columns: Tensor, bits: int, scale: Tensor) -> _State:
    k, n = columns.shape
    found = torch.zeros(k, n, dtype=torch.int8)
    tiles = empty_tiles(n, k, bits)
    return _State(bits, columns, columns.clone(), found, tiles, LEVELS[bits], scale, torch.get_num_threads())


def _feed_back(state: _State, factor: Tensor, spreads: Tensor) -> Tensor:
    """The first sequences, column of tiles after column; returns Mᵀ Eᵀ (K, N).

    What a block of them leaves is carried on in one product; what its own columns leave is added one by one, by one
    thread: torch's others wait busily after each product, and the encoder's threads want their cores.
    """
    carried = torch.zeros_like(state.error)
    for start, stop in spans(0, len(state.columns), BLOCK):
        with torch_threads(1):
            for first, last in spans(start, stop, TILE):
                own = carried[first:last]
                state.encode(first // TILE, own, factor[first:last, first:last], spreads[first:last])
                carried[first:stop].addmm_(factor[first:last, first:stop].T, state.error[first:last])
        carried[stop:].addmm_(factor[start:stop, stop:].T, state.error[start:stop])
    return carried


def _again(state: _State, product: Tensor, hessian: Tensor, ridge: float, corners: Sequence[_Corner]) -> None:
    """One pass over the columns of tiles, each encoded anew where that makes the layer's error under H + ridge smaller.

    product  (K, N): (H + ridge) Eᵀ, which is kept up with the error: what a column changes is added for those behind
             it in its block, and what a block changes for all.

    With g = Σ_i e_i (H + ridge)_ij of all inputs i but a tile column's own, the error is (e + u) B (e + u)ᵀ and a
    constant, where u B = g. With B = M D Mᵀ that is Σ_j D_j ((e M)_j + c_j)², where c = u M solves c D Mᵀ = g.
    """
    for start, stop in spans(0, len(state.columns), BLOCK):
        before = state.error[start:stop].clone()
        slopes = product[start:stop].clone()
        with torch_threads(1):
            for first, last in spans(start, stop, TILE):
                corner, own = corners[first // TILE], before[first - start : last - start]
                elsewhere = slopes[first - start : last - start].addmm_(corner.part, own, alpha=-1)
                state.encode(first // TILE, corner.solve @ elsewhere, corner.factor, corner.spreads, again=True)
                slopes[last - start :].addmm_(hessian[last:stop, first:last], state.error[first:last] - own)
        change = state.error[start:stop] - before
        product.addmm_(hessian[:, start:stop], change)
        product[start:stop].add_(change, alpha=ridge)


def _refit(state: _State, product: Tensor, hessian: Tensor, ridge: float, dtype: torch.dtype) -> tuple[float, float]:
    """Gives each row the scale of which least error follows; returns tr(W H Wᵀ) and tr(E H Eᵀ) with it.

    product  (K, N): (H + ridge) Eᵀ.

    With w = e + v and v the row as it is read back, the error of r v is w B wᵀ − 2 r w B vᵀ + r² v B vᵀ. B is H + ridge
    where r is chosen: without, inputs that never occur would leave it to the rounding of sums.
    """
    columns, error = state.columns, state.error
    whole = output_energy(columns, hessian)
    cross, lost = torch.zeros_like(whole), torch.zeros_like(whole)
    for first, last in spans(0, len(columns), 4 * BLOCK):
        cross += (columns[first:last] * product[first:last]).sum(dim=0)
        lost += (error[first:last] * product[first:last]).sum(dim=0)
    ridged = whole + ridge * columns.square().sum(dim=0).double()
    ratio = (ridged - cross) / (ridged - 2 * cross + lost)
    usable = torch.isfinite(ratio) & (ratio > 0)
    scale = stored_scale(torch.where(usable, state.scale * ratio, state.scale).float(), dtype)
    ratio = (scale / state.scale).double()
    state.scale = scale
    torch.addcmul(columns, state.found.float(), scale, value=-1, out=error)
    left = ridged - 2 * ratio * (ridged - cross) + ratio.square() * (ridged - 2 * cross + lost)
    left -= ridge * error.square().sum(dim=0).double()
    return float(whole.sum()), float(left.sum())
