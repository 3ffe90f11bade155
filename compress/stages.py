"""A recipe's stages as work on blocks: which statistics each needs, and what it does to a block's linear layers.

The algorithms are free functions over tensors in rooms of their own, imported where they are used: a recipe that rounds
to nearest loads none of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compress.activations import Inputs
from compress.block import Block, BlockStage, Statistics
from compress.errors import UserError
from compress.plan import Layer, Plan
from compress.prune_stages import MaskPrune, width_prune
from compress.quantize import rtn
from compress.recipe import Quantize, Recipe, Smooth
from compress.skeleton import Skeleton
from compress.stage_statistics import absmax_of, absmean_of, hessian_of, rows_of

if TYPE_CHECKING:
    from calib.moments import Moments, Wants
    from compress.quantize.folding import Fold
    from compress.quantize.grid import Grid

# Input rows that a search looks at, drawn evenly from the text.
SEARCH_ROWS = 512


def make_stages(recipe: Recipe, plan: Plan, skeleton: Skeleton) -> list[BlockStage]:
    """The recipe's stages on blocks, in order; depth pruning, which takes whole blocks, is not among them.

    Raises UserError for what a stage cannot do with this model.
    """
    model_type = str(skeleton.checkpoint.config.get("model_type"))
    layers = {layer.prefix: layer for layer in plan.layers.values()}
    made: list[BlockStage] = []
    for stage in recipe.stages:
        if stage.prune is not None and stage.prune.method == "width":
            if len(recipe.stages) > 1:
                raise UserError(
                    f"recipe {recipe.name}: width pruning changes sizes that other stages count on: make two runs, the "
                    "second of the first one's model/"
                )
            made.append(width_prune(skeleton, plan, stage.prune))
        elif stage.prune is not None:
            # Depth pruning is the walk's: it takes blocks before any stage sees them.
            made += [MaskPrune(stage.prune)] if stage.prune.method != "depth" else []
        elif stage.smooth is not None:
            made.append(SmoothRanges(stage.smooth, layers, model_type))
        elif stage.quantize is not None:
            made += _quantisers(stage.quantize, layers, model_type)
        else:
            raise UserError(f"recipe {recipe.name}: this stage is not wired into the walk yet: use another recipe")
    return made


def is_plain(recipe: Recipe) -> bool:
    """Whether the recipe only rounds to nearest: then tensors are taken one by one, and no block is ever built."""
    stage = recipe.quantize
    only = all(one.kind == "quantize" for one in recipe.stages)
    return only and (stage is None or (stage.method == "rtn" and stage.scheme != "int8-static"))


def _quantisers(stage: Quantize, layers: Mapping[str, Layer], model_type: str) -> list[BlockStage]:
    if stage.method == "gptq":
        return [Gptq(stage, layers)]
    if stage.method == "awq":
        return [AwqScale(stage, layers, model_type), AwqRound(stage, layers)]
    if stage.method == "rtn" and stage.scheme != "int8-static":
        return [RoundToNearest(layers)]
    raise UserError(
        f"quantize: method {stage.method} with scheme {stage.scheme} is not wired into the walk yet: use another recipe"
    )


@dataclass(frozen=True)
class RoundToNearest:
    """Every weight takes the code nearest to it."""

    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return {}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        for path, layer in chosen(block, self.layers):
            round_to_nearest(block, path, layer)
        return block


@dataclass(frozen=True)
class Gptq:
    """Codes that make up for the errors of those before them (GPTQ)."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        from calib.moments import Wants

        return {path: Wants(hessian=True) for path, _ in chosen(block, self.layers)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import gptq

        for path, layer in chosen(block, self.layers):
            if path in block.starved:
                round_to_nearest(block, path, layer)
                continue
            found = gptq.quantize(
                block.linears[path].weight.detach(),
                hessian_of(statistics, path),
                _grid(layer),
                block.dtypes[path],
                order=bool(self.stage.order),
                damping=self.stage.damping or 0.01,
                search=bool(self.stage.search),
            )
            # A Hessian is as large as four weights: the last layer that reads it lets it go.
            del statistics[path]
            block.pack(path, found.packed, layer.scheme, output_error=found.error, damping=found.damping)
        return block


@dataclass(frozen=True)
class AwqScale:
    """Moves the range of important input channels into the weights, where that is exact (AWQ's scale search)."""

    stage: Quantize
    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return _searching(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import awq, folding

        known = dict(chosen(block, self.layers))
        for fold in folding.folds(block.module, self.model_type):
            linears = [path for path in fold.linears if path in known and path in statistics]
            if linears:
                first = statistics[linears[0]]
                weights = [block.linears[path].weight.detach() for path in linears]
                rows, mean = rows_of(first), folding.share(fold, absmean_of(first))
                grid, dtype = _grid(known[linears[0]]), block.dtypes[linears[0]]
                factor = folding.share(fold, awq.search_scale(weights, rows, mean, grid, dtype))
                fold_in(block, fold, factor, statistics, dtype)
        return block


@dataclass(frozen=True)
class AwqRound:
    """Rounds to nearest within the range that costs the least (AWQ's clip search)."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return _searching(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import awq

        for path, layer in chosen(block, self.layers):
            if path not in block.starved:
                linear, grid = block.linears[path], _grid(layer)
                bounds = awq.search_clip(linear.weight.detach(), rows_of(statistics[path]), grid, block.dtypes[path])
                spread = bounds.repeat_interleave(linear.in_features // bounds.shape[1], dim=1)
                clipped = torch.minimum(torch.maximum(linear.weight.detach(), -spread), spread)
                linear.weight = nn.Parameter(clipped, requires_grad=False)
            round_to_nearest(block, path, layer)
        return block


@dataclass(frozen=True)
class SmoothRanges:
    """Moves the range of activations into the weights (SmoothQuant)."""

    stage: Smooth
    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        from calib.moments import Wants

        rows = SEARCH_ROWS if self.stage.alpha == "search" else 0
        return {path: Wants(absmax=True, rows=rows) for path, _ in chosen(block, self.layers)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import folding, smoothquant

        if self.stage.alpha == "search":
            raise UserError("smooth: alpha search is not wired into the walk yet: give a number")
        for fold in folding.folds(block.module, self.model_type):
            linears = [path for path in fold.linears if path in statistics]
            if linears:
                inputs_max = folding.share(fold, absmax_of(statistics[linears[0]]), "max")
                weights = torch.stack([block.linears[path].weight.detach().abs().amax(0) for path in linears])
                weights_max = folding.share(fold, weights.amax(0), "max")
                factor = smoothquant.factors(inputs_max, weights_max, float(self.stage.alpha))
                fold_in(block, fold, factor, statistics, block.dtypes[linears[0]])
        return block


def chosen(block: Block, layers: Mapping[str, Layer]) -> Iterator[tuple[str, Layer]]:
    """The block's linear layers that are to be quantised, by path."""
    for path, name in block.names.items():
        if name in layers:
            yield path, layers[name]


def round_to_nearest(block: Block, path: str, layer: Layer) -> None:
    """Packs one linear layer by rounding alone."""
    weight = block.linears[path].weight.detach().to(block.dtypes[path])
    packed = rtn.quantize(weight, layer.scheme, layer.group_size, symmetric=layer.symmetric, search=layer.search)
    block.pack(path, packed, layer.scheme)


def fold_in(block: Block, fold: "Fold", factor: Tensor, statistics: Statistics, dtype: torch.dtype) -> None:
    """Divides what feeds some linear layers by a factor per channel, multiplies them, and mends their statistics."""
    from compress.quantize import folding

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


def _searching(block: Block, layers: Mapping[str, Layer]) -> Mapping[str, "Wants"]:
    from calib.moments import Wants

    return {path: Wants(absmax=True, rows=SEARCH_ROWS) for path, _ in chosen(block, layers)}


def _grid(layer: Layer) -> "Grid":
    from compress.quantize.grid import Grid

    return Grid(rtn.BITS[layer.scheme], layer.group_size, layer.symmetric)
