"""Forwards and drafts as CUDA graphs: hundreds of kernels launched as one, for shapes that come again.

A graph holds addresses, so it belongs to the memory that it was captured on: the block of inputs of its size, and one
pool of keys and values. The first run of a shape is eager, which also compiles its kernels; the second is captured.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from runtime.kv_store import Store
from runtime.model.triton.batch import Shape

T = TypeVar("T")


class Computed(NamedTuple):
    """Of T rows or those asked for: logits (n, vocabulary) and hidden (n, hidden) float32, and the argmax (n,) int64 of
    logits (on_device.NON_FINITE: they are no numbers); `taken` (T, taps · hidden) of all rows. Of a graph: good until
    the next run of any."""

    logits: Tensor
    hidden: Tensor
    largest: Tensor
    taken: Tensor


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: object


class Graphs:
    """The graphs of one decoder; those of a pool go with it.

    most  graphs kept for a pool: beyond them the one that was not run for the longest time goes.
    """

    def __init__(self, device: torch.device, most: int = 64):
        self._device, self._most = device, most
        self._of: WeakKeyDictionary[Store, OrderedDict[Shape, _Captured | None]] = WeakKeyDictionary()
        self._blocks: dict[int, Tensor] = {}
        # Graphs run one after the other and nobody reads the output of one after the next: they share their memory.
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def block(self, shape: Shape) -> Tensor:
        """The inputs of a shape (words,) int32: where graphs are captured, always at the same address.

        Shapes of one size share it: each run's inputs are copied right before it.
        """
        if not shape.captured:
            return torch.empty(shape.words, dtype=torch.int32, device=self._device)
        if shape.words not in self._blocks:
            # Zeros, so that what pads the parts is never a number of nothing.
            self._blocks[shape.words] = torch.zeros(shape.words, dtype=torch.int32, device=self._device)
        return self._blocks[shape.words]

    def run(self, pool: Store, shape: Shape, forward: Callable[[], T]) -> T:
        """What `forward` computes from the shape's block and the pool, by its graph where there is one or may be one.

        `forward` must launch the same kernels on the same addresses each time, must not wait for the device, and must
        give the same when it is run twice. What it returns is good until the next run of any.
        """
        if self._memory is None or not shape.captured:
            return forward()
        known = self._of.setdefault(pool, OrderedDict())
        if shape not in known:
            known[shape] = None
            while len(known) > self._most:
                known.popitem(last=False)
            return forward()
        known.move_to_end(shape)
        captured = known[shape]
        if captured is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                out = forward()
            captured = known[shape] = _Captured(graph, out)
        captured.graph.replay()
        return cast(T, captured.out)
