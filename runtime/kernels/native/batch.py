"""The rows of one call as the kernels take them (kernels.h, Batch)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.cache import KeyValueCache
from runtime.kernels.native.binding import BatchStruct, StoreStruct
from runtime.layout import Reserved
from runtime.rows import integers


def int64(values: Tensor) -> Tensor:
    """(n,) int64, contiguous, on the CPU: the tensor itself where it is that already, as a rule."""
    if values.dtype is torch.int64 and values.is_cpu and values.is_contiguous():
        return values
    return values.to("cpu", torch.int64).contiguous()


class Batches:
    """Makes batches. What chains need is the same in every call, so it is kept, as long as a wide call needed it."""

    def __init__(self) -> None:
        self._constants = _constants(8)

    def order(self, count: int) -> Tensor:
        """0..count − 1 and maybe more, int64."""
        return self._upto(count)[2]

    def _upto(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        found = self._constants
        # Not read back after growing: another thread's forward may put a shorter one there.
        if found[0].numel() < count:
            found = self._constants = _constants(2 * count)
        return found

    def of(
        self, reserved: Sequence[Reserved], tokens: Tensor, positions: Tensor, cache: KeyValueCache
    ) -> tuple[BatchStruct, list[Any]]:
        """The rows, whose slots are taken, and what must stay alive during the call."""
        count = tokens.numel()
        zeros, chain, _ = self._upto(count)
        request, tail_from, tail_at, tail = zeros, zeros, chain, zeros
        tokens, positions = int64(tokens), int64(positions)
        slot = positions
        stores = (StoreStruct * len(reserved))(*[StoreStruct(*cache.store(r.request).pointers) for r in reserved])
        if len(reserved) > 1:
            # Not torch.repeat_interleave: it wakes all of torch's threads, which then spin on the kernels' cores.
            request = integers([number for number, r in enumerate(reserved) for _ in range(r.count)])
        if any(r.parents is not None for r in reserved):
            slot, tail_from, tail_at, tail = _tails(reserved, positions)
        kept = [tokens, request, positions, slot, tail_from, tail_at, tail]
        return BatchStruct(count, *[part.data_ptr() for part in kept], stores), [kept, stores]


def _constants(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros, −1 (a row without a list of slots), and 0, 1, 2, …"""
    return torch.zeros(count, dtype=torch.int64), torch.full((count,), -1), torch.arange(count)


def _tails(reserved: Sequence[Reserved], positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row its slot, where its own list of slots begins (position, and index in the last array; −1: no list)."""
    slot, tail_from = positions.tolist(), [0] * len(positions)
    tail_at = [-1] * len(positions)
    tail: list[int] = []
    for r in reserved:
        if r.parents is None:
            continue
        paths: list[list[int]] = []
        for index, parent in enumerate(r.parents):
            paths.append([*(paths[parent] if parent >= 0 else []), r.start + index])
            row = r.first + index
            slot[row], tail_from[row], tail_at[row] = r.start + index, r.start, len(tail)
            tail += paths[-1]
    return torch.tensor(slot), torch.tensor(tail_from), torch.tensor(tail_at), torch.tensor(tail)
