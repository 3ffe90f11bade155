"""Tensors out of a checkpoint: checked, on the device, and as layers of the kernels that run."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Architecture
from runtime.errors import UserError
from runtime.formats import mxfp4
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.kernels.joined import Joined, Linear
from runtime.model.layers import Norm

Weight = PackedWeight | Tensor


class TensorReader:
    """Takes tensors out of a checkpoint, checked and on the device."""

    def __init__(self, checkpoint: Checkpoint, kernel: Kernel, device: torch.device, planes: bool, a: Architecture):
        self.checkpoint, self.kernel, self.device, self.planes, self.a = checkpoint, kernel, device, planes, a
        self.names = frozenset(checkpoint.names())

    def weight(self, prefix: str, shape: tuple[int, int]) -> Weight:
        """The (N, K) weight of a linear layer, packed or float."""
        found = self.checkpoint.weight(prefix, unpack=not self.kernel.backend.repacks)
        # A Conv1D's, which a head never is.
        if self.a.transposed and isinstance(found, Tensor) and prefix != self.a.names.head:
            found = found.t().contiguous()
        self.check(f"{prefix}.weight", tuple(found.shape), shape)
        found = _to(found, self.device)
        if not (self.planes and isinstance(found, PackedWeight) and KINDS[found.scheme.kind].has_planes):
            return found
        if found.scheme.group_size:
            raise UserError(
                f"{self.checkpoint.path.name}: {prefix} has int8 groups of {found.scheme.group_size} inputs, and planes"
                " need one scale per output row; choose another drafter than nested"
            )
        return replace(found, planes=True)

    def bias(self, prefix: str, size: int) -> Tensor | None:
        name = f"{prefix}.bias"
        return self.vector(name, size) if name in self.names else None

    def vector(self, name: str, size: int) -> Tensor:
        """`size` numbers, float32, which a file may hold as a table of one row."""
        found = self.checkpoint.tensor(name)
        found = found[0] if found.shape == (1, size) and size > 1 else found
        self.check(name, tuple(found.shape), (size,))
        return found.to(self.device).float()

    def norm(self, name: str | None, size: int = 0) -> Norm | None:
        """A norm by its name, its offset added; None for none. Of `size` dimensions, or of the residual stream's."""
        if name is None:
            return None
        size = size or self.a.hidden
        weight = self.vector(f"{name}.weight", size)
        return Norm(weight + self.a.norm_offset if self.a.norm_offset else weight, self.bias(name, size))

    def table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.checkpoint.tensor(name)
        self.check(name, tuple(found.shape), shape)
        return found.to(self.device)

    def stack(self, name: str) -> Tensor:
        """Plain weights of experts that are fused in one tensor."""
        found = self.checkpoint.tensor(name)
        if not found.is_floating_point() or found.dtype.itemsize == 1:
            raise UserError(
                f"{self.checkpoint.path.name}: tensor {name} must be float32, float16 or bfloat16, found {found.dtype};"
                " fused experts are read plain, so use a checkpoint that has them one by one"
            )
        return found.to(self.device)

    def blocks(self, name: str, experts: int) -> list[Weight]:
        """Each expert's weight, and bias where there is one, of experts that are fused in mxfp4."""
        found = mxfp4.read_experts(self.checkpoint.shards, name, unpack=not self.kernel.backend.repacks)
        self.check(f"{name}_blocks", (len(found),), (experts,))
        if f"{name}_bias" in self.names:
            biases = self.table(f"{name}_bias", (experts, found[0].shape[0])).float()
            found = [replace(weight, bias=bias) for weight, bias in zip(found, biases, strict=True)]
        return [_to(weight, self.device) for weight in found]

    def linear(self, prefix: str, shape: tuple[int, int]) -> Linear:
        return linear(self.weight(prefix, shape), self.bias(prefix, shape[0]), self.kernel)

    def join(
        self,
        prefixes: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        orders: Sequence[Tensor | None] = (),
        whole: Sequence[int] = (),
    ) -> Joined:
        """Several layers of one input; one prefix with several sizes is a layer fused on disk.

        orders  of each prefix, in which order its rows are taken (None: as they are).
        whole   the sizes on disk, where an order takes some of the rows only.
        """
        outputs = [sum(sizes)] if len(prefixes) == 1 else whole or sizes
        weights: list[Weight] = []
        biases: list[Tensor | None] = []
        for prefix, size, order in zip(prefixes, outputs, orders or [None] * len(prefixes), strict=True):
            weights.append(take_rows(self.weight(prefix, (size, inputs)), order))
            bias = self.bias(prefix, size)
            biases.append(bias if bias is None or order is None else bias[order])
        return join(weights, biases, list(sizes), self.kernel)

    def check(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Raises UserError where a tensor's shape is not what config.json implies."""
        if found != expected:
            raise UserError(
                f"{self.checkpoint.path.name}: tensor {name} has shape {found}, config.json implies {expected};"
                " the two do not belong together"
            )


def _to(weight: Weight, device: torch.device) -> Weight:
    """Moves a weight, and drops what only its file format needs."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    parts: dict[str, Any] = {field.name: getattr(weight, field.name) for field in fields(PackedWeight)}
    moved: dict[str, Any] = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in parts.items()}
    return PackedWeight(**moved)


def take_rows(weight: Weight, order: Tensor | None) -> Weight:
    """The weight's rows in another order."""
    if order is None:
        return weight
    if isinstance(weight, Tensor):
        return weight[order]
    of_rows = ("codes", "scale", "offset", "bias")
    moved = {key: part[order] for key in of_rows if (part := getattr(weight, key)) is not None}
    # In another order the rows are no longer those of the tiles.
    return replace(weight, **moved, tiles=None)
