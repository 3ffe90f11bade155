"""One decoder layer while it is worked on."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import Moments
from compress.artifact import safetensors
from compress.errors import UserError
from compress.quantize import rtn
from compress.records import ExpertRecord, LayerRecord
from runtime.checkpoints.directory import Checkpoint
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight


@dataclass
class Block:
    """A decoder layer of transformers, with weights, in float32 on the CPU; stages change it in place.

    number, prefix  3, "model.layers.3": transformers' name of the module.
    linears         linear layers by path inside the block ("self_attn.q_proj", "mlp.experts.0.gate_proj"), routers not
                    among them. A Conv1D has become an nn.Linear.
    names, dtypes   of each of `linears`: its name in the checkpoint (for tensors that the checkpoint holds fused, the
                    name that it would have), and the type that the checkpoint holds it in.
    packed          by path; filled by quantise stages.
    records         of the packed layers; `stored_bytes` are filled in when the block is written.
    starved         linear layers, of experts mostly, that saw too few tokens and are to be rounded to nearest.
    experts         how many tokens each expert saw.
    config          what config.json has to say otherwise because of what was done here.
    """

    number: int
    prefix: str
    module: nn.Module
    linears: dict[str, nn.Linear]
    names: dict[str, str]
    dtypes: dict[str, torch.dtype]
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    records: list[LayerRecord] = field(default_factory=list)
    starved: frozenset[str] = frozenset()
    experts: list[ExpertRecord] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def pack(
        self,
        path: str,
        packed: PackedWeight,
        scheme: str,
        output_error: float | None = None,
        damping: float | None = None,
    ) -> None:
        """Takes the codes of a linear layer, and puts the weight that they stand for in its place.

        scheme  as recipes call it. The rest goes into the layer's record. Raises ValueError for a weight that has
        become another's shape or is not finite.
        """
        linear = self.linears[path]
        weight = dequantize(packed)
        if weight.shape != linear.weight.shape or not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{self.prefix}.{path}: the packed weight is {tuple(weight.shape)} or not finite, expected finite "
                f"numbers {tuple(linear.weight.shape)}"
            )
        error = rtn.relative_error(linear.weight, weight)
        self.records.append(
            LayerRecord(
                name=self.names[path],
                scheme=scheme,
                group_size=packed.scheme.group_size,
                weights=weight.numel(),
                stored_bytes=0,
                error=error,
                output_error=output_error,
                damping=damping,
            )
        )
        linear.weight = nn.Parameter(weight, requires_grad=False)
        self.packed[path] = replace(packed, bias=None)


Statistics = MutableMapping[str, Moments]
"""Of the inputs of linear layers, by path inside the block."""


_DTYPES = {name: dtype for dtype, name in safetensors.NAMES.items()}


def stored_dtype(checkpoint: Checkpoint, tensor: str) -> torch.dtype:
    """What the checkpoint holds a tensor in."""
    return _DTYPES[checkpoint.shards.entry(tensor).dtype]


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A weight in the type that its checkpoint has. Raises UserError for one that is too large for it."""
    out = tensor.detach().to(dtype)
    if not bool(torch.isfinite(out).all()):
        shown = str(dtype).removeprefix("torch.")
        raise UserError(
            f"tensor {name}: expected finite numbers after the recipe's stages, found none that {shown} can hold: "
            "change the recipe's stages, or leave the layer out with ignore"
        )
    return out
