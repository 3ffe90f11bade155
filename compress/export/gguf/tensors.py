"""The tensors of a checkpoint under the same names for every family: experts one by one, however they are stored."""

import re
from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError
from compress.export.layers import weight_of
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.record import Architecture
from runtime.formats import mxfp4
from runtime.formats.packed import PackedWeight
from runtime.model.tensor_reader import take_rows

Weight = PackedWeight | Tensor
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(weight|bias)")


class Tensors:
    """Packed or plain; a stack of experts is held until another is asked for."""

    def __init__(self, checkpoint: Checkpoint, a: Architecture):
        self.checkpoint, self.a = checkpoint, a
        self.names = frozenset(checkpoint.names())
        self._plain = {f"{a.names.embedding}.weight", f"{a.names.positions}.weight", f"{a.names.layer_table}.weight"}
        self._stack: tuple[str, Any] = "", None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, alone or in a stack."""
        if name in self.names:
            return True
        stack, _, _, part = self._fused(name)
        return f"{stack}_bias" in self.names if part == "bias" else bool(stack)

    def read(self, name: str) -> Weight:
        """A layer's weight (N, K), or any other tensor as it is stored. Raises UserError where it is missing."""
        stack, index, layer, part = self._fused(name)
        if stack:
            return self._expert(stack, index, layer, part)
        prefix, _, kind = name.rpartition(".")
        tied = self.a.tied and prefix == self.a.names.head  # it has no weight of its own
        if kind == "bias" and not tied and not self._is_vector(f"{prefix}.weight"):
            # A packed layer's is what it adds, which in some layouts is not what is stored.
            whole = weight_of(self.checkpoint, prefix)
            return whole.bias if isinstance(whole, PackedWeight) and whole.bias is not None else self._tensor(name)
        if kind != "weight" or name in self._plain or self._is_vector(name):
            return self._tensor(name)
        return weight_of(self.checkpoint, prefix)

    def _is_vector(self, name: str) -> bool:
        """Whether it is plain and no matrix."""
        return name in self.names and len(self.checkpoint.shape(name)) != 2

    def _tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name)

    def _fused(self, name: str) -> tuple[str, int, str, str]:
        """The stack that holds an expert's tensor ("": none), its index, its layer, and weight or bias."""
        found = None if name in self.names or self.a.experts is None else _EXPERT.fullmatch(name)
        if found is None or self.a.experts is None:
            return "", 0, "", ""
        base, index, layer, part = found.groups()
        for pair in self.a.experts.fused:
            stack = f"{base}.{pair[layer == 'down_proj']}"
            if stack in self.names or mxfp4.holds(self.names, stack):
                return stack, int(index), layer, part
        return "", 0, "", ""

    def _expert(self, stack: str, index: int, layer: str, part: str) -> Weight:
        experts = self.a.experts
        assert experts is not None
        key = f"{stack}_bias" if part == "bias" else stack
        if self._stack[0] != key:
            self._stack = key, self._read_stack(key, part)
        one: Weight = self._stack[1][index]
        if part == "weight" and isinstance(one, Tensor) and experts.transposed:
            one = one.t()
        if layer == "down_proj" or not self.a.gated:
            return one.contiguous() if isinstance(one, Tensor) else one
        rows = torch.arange(one.shape[0])
        up = layer == "up_proj"
        taken = rows[up::2] if experts.interleaved else rows.chunk(2)[up]
        return take_rows(one, taken)

    def _read_stack(self, key: str, part: str) -> Any:
        if part == "weight" and mxfp4.holds(self.names, key):
            return mxfp4.read_experts(self.checkpoint.shards, key)
        found = self._tensor(key)
        if not found.is_floating_point() or found.dtype.itemsize == 1:
            raise UserError(
                f"{self.checkpoint.path.name}: expected plain numbers in {key}, whose experts are fused, found"
                f" {found.dtype}: export it to another form"
            )
        return found
