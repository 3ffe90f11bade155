"""What a calibrated pass shows its stages, and models and artifacts beside it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.moments import Moments, Wants
from compress.artifact import manifest
from compress.calibration.activations import Inputs
from compress.model.block import Block, Statistics

Tiny = Callable[..., Path]
WANDA = {"prune": {"method": "wanda", "sparsity": 0.5}}
ROUND = {"quantize": {"scheme": "int4", "group_size": 32}}


class Spy:
    """A stage that keeps what it was shown, and wants a Hessian of everything."""

    def __init__(self, wants: Wants | None = None):
        self.wanted = wants or Wants(hessian=True, norms=True)
        self.statistics: list[dict[str, Moments]] = []
        self.inputs: list[Tensor] = []
        self.blocks: list[Block] = []
        self.tokens = torch.empty(0)

    def wants(self, block: Block) -> Mapping[str, Wants]:
        return dict.fromkeys(block.linears, self.wanted)

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        assert inputs is not None
        self.statistics.append(dict(statistics))
        self.inputs.append(torch.cat(list(inputs.windows())))
        self.blocks.append(block)


def hidden(model: Path, tokens: Tensor, block: int) -> Tensor:
    """What goes into a block of the whole model."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = loaded(tokens, output_hidden_states=True, use_cache=False).hidden_states[block]
    return found


def digest(out: Path) -> bytes:
    return (out / manifest.NAME).read_bytes()


def counting(name: str, method: Any, calls: list[tuple[str, int]]) -> Any:
    def counted(self: Inputs, block: Block) -> Any:
        calls.append((name, block.number))
        return method(self, block)

    return counted
