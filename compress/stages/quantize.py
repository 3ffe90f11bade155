"""A recipe's stages as work on blocks: which statistics each needs, and what it does to a block's linear layers.

The algorithms are free functions over tensors, in rooms of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.moments import Moments, Wants
from compress.calibration.activations import Inputs, matmul_precision
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.model.block_loader import BlockLoader
from compress.model.plan import Layer, Plan
from compress.quantize import drift, gptq, trellis
from compress.quantize.folding import is_known, require_known
from compress.recipe import Quantize, Recipe
from compress.recipe.block_stages import DAMPING
from compress.stages.contract import BlockStage
from compress.stages.prune import MaskPrune, width_prune
from compress.stages.ranges import AwqRound, AwqScale, SmoothRanges, StaticRanges, TrellisScale
from compress.stages.rounding import chosen, grid_of, round_to_nearest, scale_dtype, sharing
from runtime.formats.schemes import FITTED, GRIDS, SCHEMES


def make_stages(recipe: Recipe, plan: Plan, loader: BlockLoader) -> list[BlockStage]:
    """The recipe's stages on blocks, in order; depth pruning, which takes whole blocks, is not among them.

    Raises UserError for what a stage cannot do with this model.
    """
    model_type = str(loader.structure.text_config.model_type)
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
            # Depth pruning takes whole blocks before any stage sees them.
            made += [MaskPrune(stage.prune)] if stage.prune.method != "depth" else []
        elif stage.smooth is not None:
            require_known(model_type)
            made.append(SmoothRanges(stage.smooth, layers, model_type))
        elif stage.quantize is not None:
            made += _quantisers(stage.quantize, layers, model_type)
    return made


def only_rounds(recipe: Recipe) -> bool:
    """Whether the recipe only rounds, without text: then tensors are taken one by one, and no block is ever built."""
    stage = recipe.quantize
    only = all(one.kind == "quantize" for one in recipe.stages)
    methods = ("rtn", "hqq")
    return only and (stage is None or (stage.method in methods and not _is_static(stage)))


def _is_static(stage: Quantize) -> bool:
    return stage.scheme is not None and SCHEMES[stage.scheme].is_static


def _quantisers(stage: Quantize, layers: Mapping[str, Layer], model_type: str) -> list[BlockStage]:
    # Before any work: within the first block it would be told, too.
    if stage.fold is True or stage.method == "awq":
        require_known(model_type)
    if stage.layers is not None:
        parts = {prefix: stage.of(layer.module) for prefix, layer in layers.items()}
        folded = {name: layers[name] for name, part in parts.items() if part is not None and _folds(part, model_type)}
        # A factor goes into the layer before, which another part may round: all are folded before any is rounded.
        scales: list[BlockStage] = [TrellisScale(folded, model_type)] if folded else []
        return scales + [
            made
            for part in dict.fromkeys(part.stage for part in stage.layers)
            for made in _rounders(part, {name: layers[name] for name in layers if parts[name] == part}, model_type)
        ]
    scaled = [TrellisScale(layers, model_type)] if _folds(stage, model_type) else []
    return [*scaled, *_rounders(stage, layers, model_type)]


def _folds(stage: Quantize, model_type: str) -> bool:
    return is_known(model_type) if stage.fold == "auto" else bool(stage.fold)


def left_unfolded(recipe: Recipe, model_type: str) -> bool:
    """Whether channels would be scaled for a trellis (fold: auto) if the family's structure were known."""
    stages = [stage.quantize for stage in recipe.stages if stage.quantize is not None]
    parts = [part.stage for stage in stages for part in stage.layers or ()]
    return not is_known(model_type) and any(stage.fold == "auto" for stage in [*stages, *parts])


def _rounders(stage: Quantize, layers: Mapping[str, Layer], model_type: str) -> list[BlockStage]:
    """What rounds these layers, all as one stage says."""
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

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return {}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        for path, layer in chosen(block, self.layers):
            round_to_nearest(block, path, layer)


@dataclass(frozen=True)
class Gptq:
    """Codes that make up for the errors of those before them (GPTQ); eight bits are rounded to nearest."""

    stage: Quantize
    layers: Mapping[str, Layer]

    def wants(self, block: Block) -> Mapping[str, Wants]:
        paths = [path for path, layer in chosen(block, self.layers) if layer.scheme in FITTED]
        # An expert's tokens are others in the original, whose router saw other numbers.
        moves = bool(self.stage.drift)
        return {path: Wants(hessian=True, drift=moves and ".experts." not in f".{path}.") for path in paths}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        known = dict(chosen(block, self.layers))
        fitted = [path for path in known if known[path].scheme in FITTED and path not in block.starved]
        for path in known.keys() - set(fitted):
            round_to_nearest(block, path, known[path])
        for paths in sharing(fitted, statistics):
            # Layers that read one input may still differ in grid or type; each kind goes through by itself.
            kinds = {
                path: (known[path].scheme, known[path].group_size, known[path].symmetric, scale_dtype(block, path))
                for path in paths
            }
            for kind in dict.fromkeys(kinds.values()):
                same = [path for path in paths if kinds[path] == kind]
                weights = [block.linears[path].weight.detach() for path in same]
                with matmul_precision():
                    rounded = self._round(weights, statistics[paths[0]], known[same[0]], kind[-1])
                for path, found in zip(same, rounded, strict=True):
                    block.pack(path, found.packed, known[path].scheme, found.error, found.damping)
            # A Hessian is as large as the largest weights: the last layers that read it let it go.
            for path in paths:
                del statistics[path]

    def _round(self, weights: list[Tensor], moments: Moments, layer: Layer, dtype: torch.dtype) -> list[gptq.Rounded]:
        """Codes of weights that read the same inputs, all as `layer` is planned; scales of type `dtype`."""
        damping, hessian = self.stage.damping or DAMPING, moments.hessian
        if moments.wants.drift:
            share = self.stage.drift or 0.0
            weights = [drift.targets(weight, hessian, moments.drift, share, damping) for weight in weights]
        if layer.scheme not in GRIDS:
            return trellis.quantize_together(weights, hessian, SCHEMES[layer.scheme].bits, dtype, damping)
        return gptq.quantize_together(
            weights,
            hessian,
            grid_of(layer),
            dtype,
            order=bool(self.stage.act_order),
            damping=damping,
            search=bool(self.stage.search),
        )
