"""Stages that move ranges between activations and weights, or fix them: AWQ, SmoothQuant, static ranges, a trellis."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from calib.moments import Moments, Wants
from compress.calibration.activations import Inputs
from compress.calibration.statistics import collect
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.model.plan import Layer
from compress.quantize import awq, folding, grid, rtn, smoothquant, trellis
from compress.quantize.folding import Fold
from compress.recipe import Quantize, Smooth
from compress.recipe.block_stages import Experts
from compress.stages.rounding import chosen, grid_of, round_to_nearest, scale_dtype, sharing
from runtime.formats.schemes import SCHEMES

# Input rows that a search looks at, drawn evenly from the text.
SEARCH_ROWS = 512


@dataclass(frozen=True)
class AwqScale:
    """Moves the range of important input channels into the weights, where that is exact (AWQ's scale search)."""

    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return _hessians_and_sizes(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        known = dict(chosen(block, self.layers))
        for fold, paths in _foldable(block, known, statistics, self.model_type):
            # Of the tokens that a layer saw, over the most that one of them saw: what an expert's error counts.
            most = max(statistics[path].tokens for path in paths)
            shares = {path: statistics[path].tokens / most for path in paths}
            fed = [
                awq.Fed(
                    block.linears[path].weight.detach(), statistics[path].hessian, grid_of(known[path]), shares[path]
                )
                for path in paths
            ]
            means = [statistics[path].absmean * shares[path] for path in paths]
            mean = torch.stack(means).sum(dim=0) / sum(shares.values())
            found = awq.search_scale(fed, mean, scale_dtype(block, paths[0]), tie=partial(folding.share, fold))
            fold_in(block, fold, found, statistics, block.dtypes[paths[0]])


@dataclass(frozen=True)
class AwqRound:
    """Rounds to nearest within the range that costs the least (AWQ's clip search)."""

    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return _hessians_and_sizes(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        for path, layer in chosen(block, self.layers):
            if path in block.starved:
                round_to_nearest(block, path, layer)
                continue
            weight, wanted = block.linears[path].weight.detach(), grid_of(layer)
            scale, zero = awq.search_clip(weight, statistics[path].hessian, wanted, scale_dtype(block, path))
            codes = grid.encode(weight, scale, zero, wanted)
            block.pack(path, grid.to_packed(codes, scale, zero, wanted), layer.scheme)
            del statistics[path]


@dataclass(frozen=True)
class TrellisScale:
    """Gives the weights of every input channel one size, where the layer before can take the factor exactly."""

    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return {}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        known = dict(chosen(block, self.layers))
        for fold, paths in _foldable(block, known, statistics, self.model_type):
            # What a norm feeds was no nearer for it.
            if fold.previous not in block.linears:
                continue
            weights = [block.linears[path].weight.detach() for path in paths]
            factor = trellis.channel_factors(weights, partial(folding.share, fold))
            fold_in(block, fold, factor, statistics, block.dtypes[paths[0]])


@dataclass(frozen=True)
class SmoothRanges:
    """Moves the range of activations into the weights (SmoothQuant)."""

    stage: Smooth
    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, Wants]:
        rows = SEARCH_ROWS if self.stage.alpha == "search" else 0
        return {path: Wants(absmax=True, rows=rows) for path, _ in chosen(block, self.layers)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        known = dict(chosen(block, self.layers))
        for fold, paths in _foldable(block, known, statistics, self.model_type):
            weights = [block.linears[path].weight.detach() for path in paths]
            largest = torch.stack([statistics[path].absmax for path in paths]).amax(dim=0)
            tie = partial(folding.share, fold, by="max")
            if self.stage.alpha == "search":
                rows = torch.cat([statistics[group[0]].rows for group in sharing(paths, statistics)])
                static = SCHEMES[known[paths[0]].scheme].is_static
                activation: Literal["int8-tensor", "int8-token"] = "int8-tensor" if static else "int8-token"
                dtype = scale_dtype(block, paths[0])
                factor = smoothquant.search_alpha(weights, rows, largest, activation, dtype, tie=tie)
            else:
                factor = smoothquant.factors(tie(largest), tie(smoothquant.weight_absmax(weights)), self.stage.alpha)
            fold_in(block, fold, factor, statistics, block.dtypes[paths[0]])


@dataclass(frozen=True)
class StaticRanges:
    """Eight bits for weights, and one range for each layer's inputs that the text has told."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, Wants]:
        looked = {"absmax": True, "rows": SEARCH_ROWS} if self._searches else {"observer": self.stage.observer}
        return {path: Wants(**looked) for path, _ in chosen(block, self.layers)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        known = dict(chosen(block, self.layers))
        if starved := known.keys() & block.starved:
            raise UserError(
                f"{block.prefix}.{min(starved)}: expected calibration tokens for a static range, found too few: set "
                "experts.expert_fallback to all-tokens, or take scheme int8-dynamic"
            )
        if not self._searches:
            # The text goes through the block again where a stage before this one has scaled what layers read.
            wants = {path: want for path, want in self.wants(block).items() if statistics[path].observed is None}
            if wants and inputs is not None:
                statistics.update(collect(block, inputs, wants, self.stage.experts or Experts()))
        for paths in sharing(list(known), statistics):
            weights = [block.linears[path].weight.detach() for path in paths]
            first = statistics[paths[0]]
            if self._searches:
                scale = smoothquant.search_input_scale(first.rows, first.absmax.amax(), weights)
            else:
                scale = smoothquant.input_scale(torch.tensor(first.observed))
            for path in paths:
                stored = block.linears[path].weight.detach().to(block.dtypes[path])
                scheme = known[path].scheme
                block.pack(path, rtn.quantize(stored, scheme, 0, input_scale=scale), scheme)

    @property
    def _searches(self) -> bool:
        return self.stage.observer == "search"


def _foldable(
    block: Block, known: Mapping[str, Layer], statistics: Statistics, model_type: str
) -> Iterator[tuple[Fold, list[str]]]:
    """The folds of a block, each with those of its layers that are to be quantised and were calibrated, if any."""
    for fold in folding.folds(block.module, model_type):
        if paths := [path for path in fold.linears if path in known and path in statistics]:
            yield fold, paths


def fold_in(block: Block, fold: Fold, factor: Tensor, statistics: Statistics, dtype: torch.dtype) -> None:
    """Divides what feeds some linear layers by a factor per channel, multiplies them, and mends their statistics."""
    exact = folding.storable(block.module, fold, factor, dtype)
    folding.apply(block.module, fold, exact)
    made: dict[int, Moments] = {}
    for path in fold.linears:
        if path in statistics:
            old = statistics[path]
            # q, k and v share one: they go on sharing what it becomes.
            if id(old) not in made:
                made[id(old)] = old.scaled(exact)
            statistics[path] = made[id(old)]


def _hessians_and_sizes(block: Block, layers: Mapping[str, Layer]) -> Mapping[str, Wants]:
    return {path: Wants(hessian=True, absmax=True) for path, _ in chosen(block, layers)}
