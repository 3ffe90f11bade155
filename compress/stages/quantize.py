"""A recipe's stages as work on blocks: which statistics each needs, and what it does to a block's linear layers.

The algorithms are free functions over tensors in rooms of their own, imported where they are used: a recipe that rounds
to nearest loads none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from compress.calibration.activations import Inputs, quick_products
from compress.calibration.statistics import absmax_of, absmean_of, collect, hessian_of, rows_of
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.model.block_loader import BlockLoader
from compress.model.plan import Layer, Plan
from compress.quantize import rtn
from compress.recipe import Quantize, Recipe, Smooth
from compress.recipe.block_stages import DAMPING, Experts
from compress.records import LayerRecord
from compress.stages.contract import BlockStage
from compress.stages.prune import MaskPrune, width_prune
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize, to_tensors
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import GRIDS, SCHEMES
from runtime.formats.tensors import check_finite, stored_scale_dtype, tensor_bytes

if TYPE_CHECKING:
    from calib.moments import Moments, Wants
    from compress.quantize.folding import Fold
    from compress.quantize.grid import Grid


def part(checkpoint: Checkpoint, plan: Plan, names: Sequence[str]) -> tuple[dict[str, Tensor], list[LayerRecord]]:
    """The tensors that take the place of the checkpoint's tensors `names`, and a record of each packed layer.

    Raises UserError for weights that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    records = []
    for name in names:
        tensor = checkpoint.tensor(name)
        check_finite(name, tensor)
        layer = plan.layers.get(name)
        if layer is None:
            tensors[name] = tensor
            continue
        stored, record = _quantized(tensor, layer)
        tensors |= stored
        records.append(record)
    return tensors, records


def rounded(weight: Tensor, layer: Layer) -> PackedWeight:
    """A weight (outputs, inputs) rounded as its layer's plan says, without looking at text."""
    if layer.solved:
        from compress.quantize import grid, hqq

        wanted = grid.Grid(SCHEMES[layer.scheme].bits, layer.group_size, layer.symmetric)
        return hqq.quantize(weight, wanted, stored_scale_dtype(weight.dtype))
    return rtn.quantize(weight, layer.scheme, layer.group_size, symmetric=layer.symmetric, search=layer.search)


def _quantized(weight: Tensor, layer: Layer) -> tuple[dict[str, Tensor], LayerRecord]:
    if layer.transposed:
        weight = weight.T.contiguous()
    packed = rounded(weight, layer)
    stored = to_tensors(packed, layer.prefix, weight.dtype)
    record = LayerRecord(
        name=layer.prefix,
        scheme=layer.scheme,
        group_size=layer.group_size,
        weights=weight.numel(),
        stored_bytes=tensor_bytes(stored),
        error=rtn.relative_error(weight, dequantize(packed)),
    )
    return stored, record


# Input rows that a search looks at, drawn evenly from the text.
SEARCH_ROWS = 512


def make_stages(recipe: Recipe, plan: Plan, loader: BlockLoader) -> list[BlockStage]:
    """The recipe's stages on blocks, in order; depth pruning, which takes whole blocks, is not among them.

    Raises UserError for what a stage cannot do with this model.
    """
    model_type = str(loader.checkpoint.config.get("model_type"))
    layers = {layer.prefix: layer for layer in plan.layers.values()}
    made: list[BlockStage] = []
    for stage in recipe.stages:
        if stage.prune is not None and stage.prune.method == "width":
            if len(recipe.stages) > 1:
                raise UserError(
                    f"recipe {recipe.name}: width pruning changes sizes that other stages count on: make two runs, the "
                    "second of the first one's model/"
                )
            made.append(width_prune(loader, plan, stage.prune))
        elif stage.prune is not None:
            # Depth pruning is the walk's: it takes blocks before any stage sees them.
            made += [MaskPrune(stage.prune)] if stage.prune.method != "depth" else []
        elif stage.smooth is not None:
            made.append(SmoothRanges(stage.smooth, layers, model_type))
        elif stage.quantize is not None:
            made += _quantisers(stage.quantize, layers, model_type)
    return made


def is_plain(recipe: Recipe) -> bool:
    """Whether the recipe only rounds, without text: then tensors are taken one by one, and no block is ever built."""
    stage = recipe.quantize
    only = all(one.kind == "quantize" for one in recipe.stages)
    methods = ("rtn", "hqq")
    return only and (stage is None or (stage.method in methods and not _is_static(stage)))


def _is_static(stage: Quantize) -> bool:
    return stage.scheme is not None and SCHEMES[stage.scheme].is_static


def _quantisers(stage: Quantize, layers: Mapping[str, Layer], model_type: str) -> list[BlockStage]:
    if stage.method in ("gptq", "sensitivity"):
        return [Gptq(stage, layers)]
    if stage.method == "awq":
        return [AwqScale(layers, model_type), AwqRound(layers)]
    if _is_static(stage):
        return [StaticRanges(stage, layers)]
    return [RoundToNearest(layers)]


@dataclass(frozen=True)
class RoundToNearest:
    """Every weight takes the code nearest to it, on the grid that is its own or that HQQ finds."""

    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return {}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        for path, layer in chosen(block, self.layers):
            round_to_nearest(block, path, layer)
        return block


@dataclass(frozen=True)
class Gptq:
    """Codes that make up for the errors of those before them (GPTQ); eight bits are rounded to nearest."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        from calib.moments import Wants

        return {path: Wants(hessian=True) for path, layer in chosen(block, self.layers) if layer.scheme in GRIDS}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import gptq

        known = dict(chosen(block, self.layers))
        fitted = [path for path in known if known[path].scheme in GRIDS and path not in block.starved]
        for path in known.keys() - set(fitted):
            round_to_nearest(block, path, known[path])
        for paths in sharing(fitted, statistics):
            # Layers that read one input may still differ in grid or type; each kind goes through by itself.
            kinds = {path: (grid_of(known[path]), scale_dtype(block, path)) for path in paths}
            for kind in dict.fromkeys(kinds.values()):
                same = [path for path in paths if kinds[path] == kind]
                with quick_products():
                    rounded = gptq.quantize_together(
                        [block.linears[path].weight.detach() for path in same],
                        hessian_of(statistics, paths[0]),
                        *kind,
                        order=bool(self.stage.act_order),
                        damping=self.stage.damping or DAMPING,
                        search=bool(self.stage.search),
                    )
                for path, found in zip(same, rounded, strict=True):
                    block.pack(path, found.packed, known[path].scheme, found.error, found.damping)
            # A Hessian is as large as the largest weights: the last layers that read it let it go.
            for path in paths:
                del statistics[path]
        return block


@dataclass(frozen=True)
class AwqScale:
    """Moves the range of important input channels into the weights, where that is exact (AWQ's scale search)."""

    layers: Mapping[str, Layer]
    model_type: str

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return _hessians_and_sizes(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import awq, folding

        known = dict(chosen(block, self.layers))
        for fold in folding.folds(block.module, self.model_type):
            paths = [path for path in fold.linears if path in known and path in statistics]
            if not paths:
                continue
            shares = _shares(paths, statistics)
            fed = [
                awq.Fed(
                    block.linears[path].weight.detach(),
                    hessian_of(statistics, path),
                    grid_of(known[path]),
                    shares[path],
                )
                for path in paths
            ]
            means = [absmean_of(statistics[path]) * shares[path] for path in paths]
            mean = torch.stack(means).sum(dim=0) / sum(shares.values())
            found = awq.search_scale(fed, mean, scale_dtype(block, paths[0]), tie=partial(folding.share, fold))
            fold_in(block, fold, found.factor, statistics, block.dtypes[paths[0]])
        return block


@dataclass(frozen=True)
class AwqRound:
    """Rounds to nearest within the range that costs the least (AWQ's clip search)."""

    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        return _hessians_and_sizes(block, self.layers)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import awq, grid

        for path, layer in chosen(block, self.layers):
            if path in block.starved:
                round_to_nearest(block, path, layer)
                continue
            weight, wanted = block.linears[path].weight.detach(), grid_of(layer)
            scale, zero = awq.search_clip(weight, hessian_of(statistics, path), wanted, scale_dtype(block, path))
            codes = grid.encode(weight, scale, zero, wanted)
            block.pack(path, grid.to_packed(codes, scale, zero, wanted), layer.scheme)
            del statistics[path]
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
        from compress.quantize import folding

        known = dict(chosen(block, self.layers))
        for fold in folding.folds(block.module, self.model_type):
            paths = [path for path in fold.linears if path in known and path in statistics]
            if paths:
                factor = self._factor(block, fold, paths, known, statistics)
                fold_in(block, fold, factor, statistics, block.dtypes[paths[0]])
        return block

    def _factor(
        self, block: Block, fold: "Fold", paths: list[str], known: Mapping[str, Layer], statistics: Statistics
    ) -> Tensor:
        from compress.quantize import folding, smoothquant

        weights = [block.linears[path].weight.detach() for path in paths]
        largest = torch.stack([absmax_of(statistics[path]) for path in paths]).amax(dim=0)
        if self.stage.alpha == "search":
            rows = torch.cat([rows_of(statistics[group[0]]) for group in sharing(paths, statistics)])
            static = SCHEMES[known[paths[0]].scheme].is_static
            tie = partial(folding.share, fold, by="max")
            activation: Literal["int8-tensor", "int8-token"] = "int8-tensor" if static else "int8-token"
            dtype = scale_dtype(block, paths[0])
            return smoothquant.search_alpha(weights, rows, largest, activation, dtype, tie=tie).factor
        inputs_max = folding.share(fold, largest, "max")
        weights_max = folding.share(fold, smoothquant.weight_absmax(weights), "max")
        return smoothquant.factors(inputs_max, weights_max, self.stage.alpha)


@dataclass(frozen=True)
class StaticRanges:
    """Eight bits for weights, and one range for each layer's inputs that the text has told."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, "Wants"]:
        from calib.moments import Wants

        looked = {"absmax": True, "rows": SEARCH_ROWS} if self._searches else {"observer": self.stage.observer}
        return {path: Wants(**looked) for path, _ in chosen(block, self.layers)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> Block:
        from compress.quantize import smoothquant

        known = dict(chosen(block, self.layers))
        if starved := known.keys() & block.starved:
            raise UserError(
                f"{block.prefix}.{min(starved)}: expected calibration tokens for a static range, found too few: set "
                "experts.expert_fallback to all-tokens, or take scheme int8-dynamic"
            )
        if not self._searches:
            self._observe_scaled(block, statistics, inputs)
        for paths in sharing(list(known), statistics):
            weights = [block.linears[path].weight.detach() for path in paths]
            first = statistics[paths[0]]
            if self._searches:
                scale = smoothquant.search_input_scale(rows_of(first), absmax_of(first).amax(), weights)
            else:
                scale = smoothquant.input_scale(torch.tensor(first.observed))
            for path in paths:
                stored = block.linears[path].weight.detach().to(block.dtypes[path])
                scheme = known[path].scheme
                block.pack(path, rtn.quantize(stored, scheme, 0, input_scale=scale), scheme)
        return block

    @property
    def _searches(self) -> bool:
        return self.stage.observer == "search"

    def _observe_scaled(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        """Sends the text through the block again where a stage before this one has scaled what layers read."""
        wants = {path: want for path, want in self.wants(block).items() if statistics[path].observed is None}
        if wants and inputs is not None:
            statistics.update(collect(block, inputs, wants, self.stage.experts or Experts()))


def chosen(block: Block, layers: Mapping[str, Layer]) -> Iterator[tuple[str, Layer]]:
    """The block's linear layers that are to be quantised, by path."""
    for path, name in block.names.items():
        if name in layers:
            yield path, layers[name]


def sharing(paths: Sequence[str], statistics: Statistics) -> list[list[str]]:
    """The layers in groups that read the same input, which are those that share their statistics."""
    groups: dict[int, list[str]] = {}
    for path in paths:
        groups.setdefault(id(statistics[path]), []).append(path)
    return list(groups.values())


def round_to_nearest(block: Block, path: str, layer: Layer) -> None:
    """Packs one linear layer by rounding alone, as its plan says."""
    weight = block.linears[path].weight.detach().to(block.dtypes[path])
    block.pack(path, rounded(weight, layer), layer.scheme)


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


def scale_dtype(block: Block, path: str) -> torch.dtype:
    """What the scales of a layer are stored in."""
    return stored_scale_dtype(block.dtypes[path])


def grid_of(layer: Layer) -> "Grid":
    """The integers that a layer is rounded to."""
    from compress.quantize.grid import Grid

    return Grid(SCHEMES[layer.scheme].bits, layer.group_size, layer.symmetric)


def _shares(paths: Sequence[str], statistics: Statistics) -> dict[str, float]:
    """Of the tokens that a layer saw, over the most that one of them saw: what an expert's error counts."""
    most = max(statistics[path].tokens for path in paths)
    return {path: statistics[path].tokens / most for path in paths}


def _hessians_and_sizes(block: Block, layers: Mapping[str, Layer]) -> Mapping[str, "Wants"]:
    from calib.moments import Wants

    return {path: Wants(hessian=True, absmax=True) for path, _ in chosen(block, layers)}
