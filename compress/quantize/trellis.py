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

from compress.quantize.gptq import Rounded, factorize
from compress.quantize.grid import expect_finite
from compress.quantize.refine import BLOCK, spans
from runtime.devices import torch_threads
from runtime.formats.packed import PackedWeight, Tiles
from runtime.formats.tensors import round_scale
from runtime.formats.trellis import LEVELS, TILE, empty_tiles, row_scale, scheme
from runtime.native.trellis import encode_tiles

# Sizes of levels over that of the weights, of which the best is taken, by so many tiles of outputs.
_REACHES = (1.0, 1.1, 1.2, 1.3, 1.45)
_JUDGES = 8
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

    def encode(self, number: int, carried: Tensor, corner: Tensor, spreads: Tensor) -> tuple[Tensor, Tensor]:
        """New sequences of tile column `number` and their levels (C, N); `carried` (C, N) is added to its weights."""
        some = self.columns[number * TILE : (number + 1) * TILE]
        found = torch.empty(some.shape, dtype=torch.int8)
        tiles = torch.empty(len(self.tiles), self.tiles.shape[2], dtype=torch.uint8)
        given = (self.levels, some, carried, self.scale, corner, spreads)
        encode_tiles(self.bits, *given, tiles, found, threads=self.threads)
        return tiles, found

    def take(self, number: int, tiles: Tensor, found: Tensor) -> None:
        """Takes them."""
        here = slice(number * TILE, (number + 1) * TILE)
        self.tiles[:, number], self.found[here] = tiles, found
        torch.addcmul(self.columns[here], found.float(), self.scale, value=-1, out=self.error[here])


@dataclass(frozen=True)
class _Products:
    """H times what a layer has, (K, N) float32 each: what passes over all columns would else multiply anew.

    columns  H Wᵀ.   found  H times the levels, kept up with them.
    """

    columns: Tensor
    found: Tensor

    def error(self, state: _State, here: slice) -> Tensor:
        """H Eᵀ of the inputs `here`."""
        return torch.addcmul(self.columns[here], self.found[here], state.scale, value=-1)


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
    passes: int = 2,
) -> list[Rounded]:
    """Sequences of layers that read the same inputs, (N, K) each; H is factored once, and every layer is as if alone.

    hessian  (K, K) float32, symmetric: the mean of x xᵀ. It is only read.
    dtype    what scales are stored in.
    damping  is raised tenfold until H can be factored.
    passes   over all columns afterwards.

    Raises ValueError for values that are not finite, shapes that do not fit, scales that overflow `dtype`, or an H that
    is not a Gram matrix; UserError where the native library is missing.
    """
    k = hessian.shape[0]
    if hessian.shape != (k, k) or any(weight.ndim != 2 or weight.shape[1] != k for weight in weights):
        raise ValueError(f"weights {[list(w.shape) for w in weights]} do not fit a Hessian {list(hessian.shape)}")
    for name, tensor in (*(("the weight", weight) for weight in weights), ("the Hessian", hessian)):
        expect_finite(name, tensor)
    factor, spreads, ridge = factorize(hessian, None, damping)
    corners = _corners(hessian, ridge) if passes else []
    return [_quantize(weight, hessian, bits, dtype, factor, spreads, ridge, corners, passes) for weight in weights]


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
    _feed_back(state, factor, spreads)
    products = _Products(hessian @ columns, hessian @ state.found.float())
    for _ in range(passes):
        _refit(state, products, ridge, dtype)
        _again(state, products, hessian, ridge, corners)
    _refit(state, products, ridge, dtype)
    whole, lost = _energies(state, products)
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
    # All sizes side by side, as if they were more outputs; whole tiles, so that none has outputs of two sizes.
    scales = torch.cat([round_scale(scale[some] * reach, dtype) for reach in _REACHES])
    state = _start(columns[:, some].repeat(1, len(_REACHES)), bits, scales)
    _feed_back(state, factor, spreads)
    losses = ((factor.T @ state.error).square_() * spreads.unsqueeze(1)).sum(dim=0).view(len(_REACHES), -1).sum(dim=1)
    return round_scale(scale * _REACHES[int(losses.argmin())], dtype)


def _start(columns: Tensor, bits: int, scale: Tensor) -> _State:
    k, n = columns.shape
    found = torch.zeros(k, n, dtype=torch.int8)
    tiles = empty_tiles(n, k, bits)
    return _State(bits, columns, columns.clone(), found, tiles, LEVELS[bits], scale, torch.get_num_threads())


def _feed_back(state: _State, factor: Tensor, spreads: Tensor) -> None:
    """The first sequences, column of tiles after column.

    What is carried to a block of them is one product; what its own columns leave is added one by one, by one thread:
    torch's others wait busily after each product, and the encoder's threads want their cores.
    """
    for start, stop in spans(0, len(state.columns), BLOCK):
        carried = factor[:start, start:stop].T @ state.error[:start]
        with torch_threads(1):
            for first, last in spans(start, stop, TILE):
                own = carried[first - start : last - start]
                found = state.encode(first // TILE, own, factor[first:last, first:last], spreads[first:last])
                state.take(first // TILE, *found)
                carried[last - start :].addmm_(factor[first:last, last:stop].T, state.error[first:last])


def _again(state: _State, products: _Products, hessian: Tensor, ridge: float, corners: Sequence[_Corner]) -> None:
    """One pass over the columns of tiles, each encoded anew where that makes the layer's error under H + ridge smaller.

    What one changes is added for those behind it in its block, and what a block changes in one product for all.
    """
    for start, stop in spans(0, len(state.columns), BLOCK):
        slopes = products.error(state, slice(start, stop)).add_(state.error[start:stop], alpha=ridge)
        levels = state.found[start:stop].float()
        with torch_threads(1):
            for first, last in spans(start, stop, TILE):
                before = state.error[first:last].clone()
                number = first // TILE
                _encode_again(state, corners[number], number, slopes[first - start : last - start])
                change = state.error[first:last] - before
                slopes[last - start :].addmm_(hessian[last:stop, first:last], change)
        products.found.addmm_(hessian[:, start:stop], state.found[start:stop].float().sub_(levels))


def _encode_again(state: _State, corner: _Corner, number: int, slopes: Tensor) -> None:
    """The tiles of a column, anew.

    slopes  (C, N): Σ e_i (H + ridge)_ij of all columns i; it is changed.

    With g the slopes less their own columns' part the error is (e + u) B (e + u)ᵀ and a constant, where u B = g. With
    B = M D Mᵀ it is Σ_j D_j ((e M)_j + c_j)², where c = u M solves c D Mᵀ = g.
    """
    here = slice(number * TILE, number * TILE + len(slopes))
    error = state.error[here]
    elsewhere = slopes.addmm_(corner.part, error, alpha=-1)
    tiles, found = state.encode(number, corner.solve @ elsewhere, corner.factor, corner.spreads)
    # By e → e + d the error grows by d B (2 e + d)ᵀ + 2 d gᵀ.
    change = (state.found[here].float() - found.float()).mul_(state.scale)
    growth = (change * torch.addmm(elsewhere, corner.part, torch.add(change, error, alpha=2), beta=2)).sum(dim=0)
    rows = torch.nn.functional.pad(growth, (0, -len(growth) % TILE)).view(-1, TILE).sum(dim=1)
    worse = rows >= 0
    tiles[worse] = state.tiles[worse, number]
    kept = worse.repeat_interleave(TILE)[: len(growth)]
    found[:, kept] = state.found[here][:, kept]
    state.take(number, tiles, found)


def _refit(state: _State, products: _Products, ridge: float, dtype: torch.dtype) -> None:
    """The scale of each row of which least error follows: with levels q it is q H wᵀ / q H qᵀ."""
    squares, wanted = torch.zeros_like(state.scale), torch.zeros_like(state.scale)
    for here in _pieces(state):
        values = state.found[here].float()
        product = torch.add(products.found[here], values, alpha=ridge)
        squares += (values * product).sum(dim=0)
        wanted += (state.columns[here] * product).sum(dim=0)
    best = wanted / squares
    usable = (squares > 0) & (best > 0)
    state.scale = torch.where(usable, round_scale(torch.where(usable, best, state.scale), dtype), state.scale)
    for here in _pieces(state):
        torch.addcmul(state.columns[here], state.found[here].float(), state.scale, value=-1, out=state.error[here])


def _energies(state: _State, products: _Products) -> tuple[float, float]:
    """tr(W H Wᵀ) and tr(E H Eᵀ)."""
    whole = lost = 0.0
    for here in _pieces(state):
        whole += float((state.columns[here] * products.columns[here]).sum(dtype=torch.float64))
        lost += float((state.error[here] * products.error(state, here)).sum(dtype=torch.float64))
    return whole, lost


def _pieces(state: _State) -> list[slice]:
    """The inputs in blocks: no copy is as large as the layer."""
    return [slice(*span) for span in spans(0, len(state.columns), 4 * BLOCK)]
