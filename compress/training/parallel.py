"""Data parallelism over processes that `torchrun` started: every process takes its rows, gradients are averaged.

`torchrun --nproc-per-node 2 -m …` starts the processes; gloo carries the sums. Process 0 writes files and speaks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor

T = TypeVar("T")
# Process 0 prunes and measures while the others wait.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class World:
    """This process among its peers: `rank` of `size`."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its mean over the processes. One exchange per dtype and device."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            distributed.all_reduce(flat)
            flat /= self.size
            parts = flat.split([tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by process 0's."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def agree(self, value: float) -> float:
        """Process 0's number, for all."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(shared, src=0)
        return float(shared)

    def share(self, value: T | None = None) -> T:
        """Process 0's value, for all: anything that can be sent between processes of one program."""
        box = [value]
        if self.size > 1:
            distributed.broadcast_object_list(box, src=0)
        return cast("T", box[0])


def alone() -> World:
    """One process without peers."""
    return World(0, 1)


def current() -> World:
    """The processes that `joined` has brought together; without it one alone."""
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size())
    return alone()


def follows() -> bool:
    """Whether torchrun has started this process as one that neither writes nor speaks."""
    return distributed.is_available() and distributed.is_torchelastic_launched() and os.environ.get("RANK", "0") != "0"


@contextmanager
def joined() -> Iterator[World]:
    """Joins the processes of `torchrun` for the block's duration; without torchrun it is one process alone."""
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        yield alone()
        return
    distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield current()
    finally:
        distributed.destroy_process_group()
