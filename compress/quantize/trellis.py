"""Sequences of a trellis that make up for each other's rounding, given the second moments of a layer's inputs.

The objective is that of gptq.py, tr(E H Eᵀ) with H = M D Mᵀ, and so is the rule: what the columns before have left is
added to each column's target (LDLQ; QTIP, 2406.11235, applies it to a trellis). Sixteen columns at a time are encoded,
by Viterbi's algorithm; inside of them each survivor carries its own errors on (runtime/native/trellis_encode.cpp).

Then every column of tiles is encoded again, given all others as they are (`_again`), as refine.py does with codes: what
gptq.py fixed before it knew the later columns can change. A tile whose error would grow keeps its sequence.

In the code the names are those of gptq.py: columns = Wᵀ (K, N), error = Eᵀ, factor = M, spreads = D.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.gptq import Rounded, factorize, output_energy
from compress.quantize.grid import expect_finite
from compress.quantize.refine import spans
from runtime.formats.packed import PackedWeight, Tiles
from runtime.formats.tensors import round_scale
from runtime.formats.trellis import LEVELS, TILE, empty_tiles, row_scale, scheme, states
from runtime.native.trellis import encode_tiles

# Levels are fitted to so many columns of weights, so many times.
_SAMPLE = 1 << 18
_FITS = 4
# Largest level of a table.
_REACH = 127


@dataclass
class _State:
    """A layer under way; its tensors are changed in place.

    columns  (K, N) float32, never changed; error (K, N): `columns` less what the sequences are read back as.
    found    (K, N) int8: their levels.   tiles  as files have them.   levels  (128,) int8.   scale  (N,) float32.
    """

    bits: int
    columns: Tensor
    error: Tensor
    found: Tensor
    tiles: Tensor
    levels: Tensor
    scale: Tensor

    def encode(self, number: int, carried: Tensor, corner: Tensor, spreads: Tensor) -> tuple[Tensor, Tensor]:
        """New sequences of tile column `number` and their levels (C, N); `carried` (C, N) is added to its weights."""
        some = self.columns[number * TILE : (number + 1) * TILE]
        found = torch.empty(some.shape, dtype=torch.int8)
        tiles = torch.empty(len(self.tiles), self.tiles.shape[2], dtype=torch.uint8)
        encode_tiles(self.bits, self.levels, some, carried, self.scale, corner, spreads, tiles, found)
        return tiles, found

    def take(self, number: int, tiles: Tensor, found: Tensor) -> None:
        """Takes them."""
        here = slice(number * TILE, (number + 1) * TILE)
        self.tiles[:, number], self.found[here] = tiles, found
        torch.addcmul(self.columns[here], found.float(), self.scale, value=-1, out=self.error[here])


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
    return [_quantize(weight, hessian, bits, dtype, factor, spreads, ridge, passes) for weight in weights]


def _quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    dtype: torch.dtype,
    factor: Tensor,
    spreads: Tensor,
    ridge: float,
    passes: int,
) -> Rounded:
    columns = weight.float().T.contiguous()
    k, n = columns.shape
    scale = row_scale(columns, LEVELS[bits], dtype)
    levels = fit_levels(columns / scale, bits)
    scale = row_scale(columns, levels, dtype)
    found = torch.zeros(k, n, dtype=torch.int8)
    state = _State(bits, columns, columns.clone(), found, empty_tiles(n, k, bits), levels, scale)
    _feed_back(state, factor, spreads)
    for _ in range(passes):
        _refit(state, hessian, ridge, dtype)
        _again(state, hessian, ridge)
    _refit(state, hessian, ridge, dtype)
    whole = float(output_energy(columns, hessian).sum())
    lost = float(output_energy(state.error, hessian).sum())
    packed = PackedWeight(
        scheme(bits), state.found.T.contiguous(), state.scale.unsqueeze(1), tiles=Tiles(state.tiles, levels)
    )
    error = math.sqrt(max(lost, 0.0) / whole) if whole > 0 else 0.0
    return Rounded(packed, error, ridge / (float(hessian.diagonal().mean()) or 1.0))


def fit_levels(units: Tensor, bits: int, start: Tensor | None = None, fits: int = _FITS) -> Tensor:
    """Levels (128,) int8 for weights (K, N) that were divided by their rows' scales: Lloyd's rule on a trellis.

    In turns the sequences take the levels, and each level becomes the mean of the weights that took it, those of the
    state with the other sign turned around. `start` is `LEVELS` where none is given.
    """
    levels = (LEVELS[bits] if start is None else start).clone()
    every = max(1, units.numel() // _SAMPLE)
    sample = units[: len(units) // TILE * TILE if len(units) >= TILE else len(units)]
    sample = sample.unflatten(0, (-1, min(TILE, len(sample))))[::every].flatten(0, 1).contiguous()
    one, spreads = torch.ones(sample.shape[1]), torch.ones(TILE)
    for _ in range(fits):
        total, count = torch.zeros(128, dtype=torch.float64), torch.zeros(128, dtype=torch.float64)
        for first, last in spans(0, len(sample), TILE):
            some = sample[first:last].contiguous()
            tiles, found = empty_tiles(some.shape[1], len(some), bits)[:, 0], torch.empty(some.shape, dtype=torch.int8)
            corner = torch.eye(len(some))
            encode_tiles(bits, levels, some, torch.zeros_like(some), one, corner, spreads[: len(some)], tiles, found)
            _count(tiles, some, bits, total, count)
        means = torch.where(count > 0, total / count.clamp(min=1), levels.double())
        levels = (means * (_REACH / means.abs().max())).round().to(torch.int8)
    return levels


def _count(tiles: Tensor, weights: Tensor, bits: int, total: Tensor, count: Tensor) -> None:
    """Adds the weights (16, N) of a column of tiles to those of the states that they took."""
    own = states(tiles, bits).view(-1, 4, TILE, 4).permute(1, 3, 0, 2).reshape(TILE, -1)
    own = own[: len(weights), : weights.shape[1]].long()
    total.index_add_(0, (own & 127).flatten(), torch.where(own > 127, -weights, weights).double().flatten())
    count.index_add_(0, (own & 127).flatten(), torch.ones(own.numel(), dtype=torch.float64))


def _feed_back(state: _State, factor: Tensor, spreads: Tensor) -> None:
    """The first sequences, column after column."""
    for number, (first, last) in enumerate(spans(0, len(state.columns), TILE)):
        carried = factor[:first, first:last].T @ state.error[:first]
        state.take(number, *state.encode(number, carried, factor[first:last, first:last], spreads[first:last]))


def _again(state: _State, hessian: Tensor, ridge: float) -> None:
    """One pass over the columns of tiles, each encoded anew where that makes the layer's error smaller.

    With g = Σ e_i H_ij of all columns elsewhere the error is (e + u) B (e + u)ᵀ and a constant, B the columns' own part
    of H and u B = g. With B = M D Mᵀ it is Σ_j D_j ((e M)_j + c_j)², where c = u M solves c D Mᵀ = g.
    """
    for number, (first, last) in enumerate(spans(0, len(state.columns), TILE)):
        here = slice(first, last)
        own = hessian[here, here].clone()
        elsewhere = hessian[here] @ state.error - own @ state.error[here]
        own.diagonal().add_(ridge)
        corner, spreads, _ = factorize(own, None, 0.0)
        carried = torch.linalg.solve_triangular(corner, elsewhere, upper=True, unitriangular=True) / spreads.unsqueeze(
            1
        )
        tiles, found = state.encode(number, carried, corner, spreads)
        error = state.columns[here] - found.float() * state.scale
        old, new = (
            (corner.T @ errors + carried).square_().mul_(spreads.unsqueeze(1)).sum(dim=0)
            for errors in (state.error[here], error)
        )
        rows = torch.nn.functional.pad(new - old, (0, -len(new) % TILE)).view(-1, TILE).sum(dim=1)
        worse = rows >= 0
        tiles[worse] = state.tiles[worse, number]
        kept = worse.repeat_interleave(TILE)[: len(new)]
        found[:, kept] = state.found[here][:, kept]
        state.take(number, tiles, found)


def _refit(state: _State, hessian: Tensor, ridge: float, dtype: torch.dtype) -> None:
    """The scale of each row of which least error follows: with levels q it is q H wᵀ / q H qᵀ."""
    values = state.found.float()
    product = hessian @ values + ridge * values
    squares = (values * product).sum(dim=0)
    best = (state.columns * product).sum(dim=0) / squares
    usable = (squares > 0) & (best > 0)
    state.scale = torch.where(usable, round_scale(torch.where(usable, best, state.scale), dtype), state.scale)
    torch.addcmul(state.columns, values, state.scale, value=-1, out=state.error)
