"""Pruning as stages: single weights of every linear layer, or whole heads and channels of the block."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from calib.moments import Wants
from compress.calibration.activations import Inputs
from compress.model.block import Block, Statistics
from compress.model.block_loader import BlockLoader
from compress.model.plan import Plan
from compress.prune import masks, sparsegpt, width
from compress.prune.width import DOWN_PROJ, O_PROJ, Sizes
from compress.recipe import Prune

# What says a block's width in a config.json.
_WIDTH_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


@dataclass(frozen=True)
class MaskPrune:
    """Single weights become zeros: the smallest (magnitude), the least felt (Wanda), with the others mending it
    (SparseGPT)."""

    stage: Prune

    def wants(self, block: Block) -> Mapping[str, Wants]:
        if self.stage.method == "magnitude":
            return {}
        want = Wants(norms=True) if self.stage.method == "wanda" else Wants(hessian=True)
        return dict.fromkeys(block.linears, want)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        sparsity = _sparsity(self.stage)
        for path, linear in block.linears.items():
            weight = linear.weight.detach()
            if self.stage.method == "magnitude" or path in block.starved:
                weight = weight * masks.magnitude_mask(weight, sparsity)
            elif self.stage.method == "wanda":
                weight = weight * masks.wanda_mask(weight, statistics[path].norms, sparsity)
            else:
                weight = sparsegpt.prune(weight, statistics[path].hessian, sparsity)
            linear.weight = nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True)
class WidthPrune:
    """Heads and MLP channels go, and what is left is fitted to what the block gave.

    before, after  the sizes of a block.
    config         what config.json says of the new ones; model_config: that and all of the rest, for transformers.
    """

    before: Sizes
    after: Sizes
    config: Mapping[str, Any]
    model_config: Any

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return {path: Wants(hessian=True) for path in (O_PROJ, DOWN_PROJ)}

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        tensors = {path: parameter.detach() for path, parameter in block.module.named_parameters()}
        hessians = {path: statistics[path].hessian for path in (width.O_PROJ, width.DOWN_PROJ)}
        narrowed = width.narrow(tensors, hessians, self.before, self.after)
        with torch.device("meta"):
            # transformers' own layer at the new sizes: its forward knows them from the configuration.
            narrow: Any = type(block.module)
            module: nn.Module = narrow(self.model_config, block.number).eval()
        parameters = {path: nn.Parameter(tensor, requires_grad=False) for path, tensor in narrowed.items()}
        module.load_state_dict(parameters, strict=True, assign=True)
        block.module = module
        block.linears = {path: _linear(module, path) for path in block.linears}
        block.config |= self.config
        # Of other sizes now, or of other inputs.
        statistics.clear()


def width_prune(loader: BlockLoader, plan: Plan, stage: Prune) -> WidthPrune:
    """The stage for a model. Raises UserError for one whose blocks cannot be narrowed, or not by so much."""
    assert stage.share is not None
    config = loader.checkpoint.config
    before, shapes, outside = width.sizes(config), dict[str, tuple[int, ...]](), 0
    for _, names in plan.parts:
        for name in names:
            slot, number = loader.slot(name), loader.structure.block(name)
            if number == 0 and slot is not None:
                shapes[f"{slot.path}.{slot.leaf}"] = loader.checkpoint.shape(name)
            elif number is None:
                outside += math.prod(loader.checkpoint.shape(name))
    after = width.shrink(config, shapes, outside, stage.share)
    changed = {key: width.narrow_config(config, after)[key] for key in _WIDTH_KEYS}
    narrow = copy.deepcopy(loader.structure.config)
    for key, value in changed.items():
        setattr(narrow, key, value)
    return WidthPrune(before, after, changed, narrow)


def _linear(module: nn.Module, path: str) -> nn.Linear:
    found = module.get_submodule(path)
    assert isinstance(found, nn.Linear)
    return found


def _sparsity(stage: Prune) -> float | tuple[int, int]:
    """The share that becomes zero, or (kept, of)."""
    if stage.pattern is None:
        assert stage.sparsity is not None
        return stage.sparsity
    kept, _, of = stage.pattern.partition(":")
    return int(kept), int(of)
