"""What a forward reads besides weights and cache: one block of int32 on the device, filled by one copy.

Its shape is a bucket, the forward's sizes rounded up, so that few shapes serve all forwards and a graph can be captured
for each. Rows that fill a bucket up see nothing, and what they write goes to the scratch page.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cache.slots import Reserved, paths
from runtime.contract import StateKind
from runtime.kernels.triton.row_states import Walk
from runtime.kv_store import KEY_BLOCK
from runtime.model.triton.cache import WIDEST, GpuCache
from runtime.model.triton.states import fill_walk

Words = NDArray[np.int32]
Block = TypeVar("Block", Words, Tensor)
# Rows of forwards that are captured. Wider ones (prompts) take a multiple of the widest.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, WIDEST)
# The least context and the least depth of a tree that a shape is made for.
LEAST_BLOCKS, LEAST_TAIL = 8, 8
# Rows of one request beyond which attention reads keys no more often.
MOST_SHARING = 16
# int32 numbers to which every part of the block is aligned: 64 bytes, which the widest loads ask for.
ALIGNMENT = 16
# The position of rows that see nothing.
NOWHERE = -1
# Pinned blocks that the host may fill ahead of the device.
_RING = 4


class Shape(ABC):
    """The shape of inputs in one block of int32, equal to others whose kernels differ in addresses alone."""

    @property
    @abstractmethod
    def captured(self) -> bool:
        """Whether the shape comes again and again, so that a graph pays."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What the block consists of."""

    @cached_property
    def places(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """Each part with its begin, end and shape, and the end of all."""
        out, begin = [], 0
        for name, shape in self.shapes().items():
            out.append((name, begin, begin + prod(shape), shape))
            begin += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        return [*out, ("", begin, begin, (0,))]

    @property
    def words(self) -> int:
        """int32 numbers of the whole block."""
        return self.places[-1][1]

    def cut(self, words: Block) -> dict[str, Block]:
        """The parts of a block (words,) int32, as views."""
        return {name: words[begin:end].reshape(shape) for name, begin, end, shape in self.places[:-1]}


@dataclass(frozen=True)
class Bucket(Shape):
    """The shape of a forward's inputs.

    rows      T; requests  R, at least one more than there are where rows were added, else as many or more.
    blocks    the most blocks of 64 keys that a row may see.
    tail      the most rows on a path of a tree (0: chains alone, whose slots are their positions).
    sharing   adjacent rows of one request, most of the time.
    states    what the states of layers that carry one from row to row are held in; None: there are none.
    """

    rows: int
    requests: int
    blocks: int
    tail: int
    sharing: int = 1
    states: StateKind | None = None

    @property
    def halves(self) -> bool:
        """Whether states are float16."""
        return self.states == "float16"

    @property
    def captured(self) -> bool:
        return self.rows <= WIDTHS[-1]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            **dict.fromkeys(("token", "position", "slot", "request", "start"), (self.rows,)),
            "tail": (self.rows, self.tail),
            "table": (self.requests, self.blocks),
            "span": (self.requests if self.states else 0, 2),
            "address": (self.rows if self.states else 0, 4),
        }


@lru_cache(maxsize=256)
def bucket_for(rows: int, requests: int, keys: int, depth: int, states: StateKind | None = None) -> Bucket:
    """The bucket of a forward: its rows and requests, the most keys that a row sees, the deepest path of a tree.

    Always the same object for the same numbers, which knows its places already.
    """
    widest = WIDTHS[-1]
    wide = next(width for width in WIDTHS if width >= rows) if rows <= widest else -(-rows // widest) * widest
    # Each row may be a request of its own where a graph is captured, so that the number of requests makes no shapes.
    many = wide if wide <= widest else _power(requests + 1, 1)
    blocks = _power(-(-keys // KEY_BLOCK), LEAST_BLOCKS)
    sharing = min(_power(rows // requests, 1), MOST_SHARING)
    return Bucket(wide, many, blocks, _power(depth, LEAST_TAIL) if depth else 0, sharing, states)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The block on the device as kernels read it, int32.

    token, position, slot, request, start  (T,): the row's token; its logical position; where in the memory its key goes
              (block · 64 + place); its request's row of `table`; the first position whose key lies in `tail`, the same
              for all rows of a request.
    tail      (T, W) the request's slots of the keys from `start` on; W = 0 where all rows are chains.
    table     (R, B) the memory's blocks of each request.
    span      (R, 2), and address (T, 4): those of 64 bits that row_states.Walk has; none where no layer has a state.
    halves    whether states are float16.
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    request: Tensor
    start: Tensor
    tail: Tensor
    table: Tensor
    span: Tensor
    address: Tensor
    halves: bool = False

    @property
    def walk(self) -> Walk:
        """How layers that carry a state go through the rows."""
        return Walk(self.span, self.address.view(torch.int64), self.halves)


def fill(bucket: Bucket, out: Words, tokens: Words, reserved: Sequence[Reserved], cache: GpuCache) -> None:
    """Writes a forward's inputs into `out` (bucket.words,): its rows' tokens (T or fewer,), and the slots they got.

    Rows that `reserved` does not have are rows that nobody reads.
    """
    part = bucket.cut(out)
    cache.tables([r.request for r in reserved], bucket.blocks, part.pop("table"))
    fill_up(part, bucket, cache)
    part["token"][: len(tokens)] = tokens
    if bucket.states:
        fill_walk(part["span"], part["address"].view(np.int64), reserved, cache)
    for number, r in enumerate(reserved):
        rows = slice(r.first, r.first + r.count)
        part["slot"][rows] = cache.slots(r.request, r.start, r.count)
        part["request"][rows] = number
        if r.parents is None:
            part["position"][rows] = np.arange(r.start, r.start + r.count, dtype=np.int32)
            # All keys of a chain lie in the slots of their positions.
            part["start"][rows] = r.start + r.count
            continue
        part["start"][rows] = r.start
        for row, path in enumerate(paths(r.parents)):
            part["position"][r.first + row] = r.start + len(path) - 1
            part["tail"][r.first + row, : len(path)] = np.asarray(path, dtype=np.int32) + r.start


def fill_up(part: dict[str, Words], bucket: Bucket, cache: GpuCache) -> None:
    """Makes all rows such that nobody reads: of the last request, which others have only where no row is added."""
    out_of_use = {"position": NOWHERE, "request": bucket.requests - 1, "slot": cache.scratch * KEY_BLOCK}
    for name, words in part.items():
        words.fill(out_of_use.get(name, 0))


def depth_of(reserved: Sequence[Reserved]) -> int:
    """Rows on the longest path of any tree; 0 where all are chains."""
    trees = [r.parents for r in reserved if r.parents is not None]
    return max((len(path) for parents in trees for path in paths(parents)), default=0)


class Staging:
    """Blocks of host memory on their way to the device. On CUDA pinned, so that a copy does not hold the host up; a
    block is filled again only when its copy is done."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._ring: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * (_RING if self._cuda else 1)
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._ring)
        self._next = 0

    def take(self, words: int) -> Words:
        """A block to be filled and then sent."""
        if (event := self._sent[self._next]) is not None:
            event.synchronize()
        if self._ring[self._next].numel() < words:
            self._ring[self._next] = torch.empty(_power(words, 1024), dtype=torch.int32, pin_memory=self._cuda)
        block: Words = self._ring[self._next].numpy()[:words]
        return block

    def send(self, target: Tensor) -> None:
        """Copies the block that was taken last to `target` (words,) int32, without waiting."""
        target.copy_(self._ring[self._next][: target.numel()], non_blocking=True)
        if self._cuda:
            event = self._sent[self._next] = self._sent[self._next] or torch.cuda.Event()
            event.record()
        self._next = (self._next + 1) % len(self._ring)


def _power(value: int, least: int) -> int:
    """The least power of two that is no smaller than either."""
    return max(least, 1 << max(0, value - 1).bit_length())
