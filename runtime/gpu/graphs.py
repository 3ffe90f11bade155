"""Forwards as CUDA graphs: hundreds of kernels launched as one, for shapes that come again.

A graph holds addresses, so it belongs to the memory that it was captured on: the block of inputs of its bucket, and one
pool of keys and values. The first run of a shape is eager, which also compiles its kernels; the second is captured.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from runtime.gpu.cache import Pool
from runtime.gpu.inputs import Bucket


class Computed(NamedTuple):
    """Of T rows or those asked for: logits (n, vocabulary) and hidden (n, hidden) float32, and the argmax (n,) int64 of
    logits (choices.BROKEN: they are no numbers). Of a graph: good until the next run of any."""

    logits: Tensor
    hidden: Tensor
    largest: Tensor


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: Computed


class Graphs:
    """The graphs of one decoder; those of a pool go with it.

    most  graphs kept for a pool: beyond them the one that was not run for the longest time goes.
    """

    def __init__(self, device: torch.device, most: int = 64):
        self._device, self._most = device, most
        self._of: WeakKeyDictionary[Pool, OrderedDict[Bucket, _Captured | None]] = WeakKeyDictionary()
        self._blocks: dict[Bucket, Tensor] = {}
        # Graphs run one after the other and nobody reads the output of one after the next: they share their memory.
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def block(self, bucket: Bucket) -> Tensor:
        """The inputs of a bucket (words,) int32: always at the same address where graphs are captured."""
        if not bucket.captured:
            return torch.empty(bucket.words, dtype=torch.int32, device=self._device)
        if bucket not in self._blocks:
            # Zeros, so that what pads the parts is never a number of nothing.
            self._blocks[bucket] = torch.zeros(bucket.words, dtype=torch.int32, device=self._device)
        return self._blocks[bucket]

    def run(self, pool: Pool, bucket: Bucket, forward: Callable[[], Computed]) -> Computed:
        """What `forward` computes from the bucket's block and the pool, by its graph where there is one or may be one.

        `forward` must launch the same kernels on the same addresses each time, must not wait for the device, and must
        give the same when it is run twice.
        """
        if self._memory is None or not bucket.captured:
            return forward()
        known = self._of.setdefault(pool, OrderedDict())
        if bucket not in known:
            known[bucket] = None
            while len(known) > self._most:
                known.popitem(last=False)
            return forward()
        known.move_to_end(bucket)
        captured = known[bucket]
        if captured is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                out = forward()
            captured = known[bucket] = _Captured(graph, out)
        captured.graph.replay()
        return captured.out
