"""The paged cache of a GPU: one pool for all requests, whose tables a forward takes along in its one copy of inputs.

What kernels write for rows that only fill a forward up goes to a page that no request ever holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cache.contiguous import blocks_for
from runtime.cache.paged import PagedCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.snapshots import bytes_of_snapshots
from runtime.cache.states import bytes_of_states
from runtime.checkpoints.architecture import Architecture
from runtime.errors import UserError
from runtime.kv_store import KEY_BLOCK, Store

# Rows of the widest forward that is captured. (Here, because the cache asks this file for room.)
WIDEST = 64
# Rows of a prompt in one forward (batching.PREFILL_ROWS, drafters.model.PREFILL_ROWS).
_PROMPT_ROWS = 512
# A text that there must be room for, where the model's positions go that far.
_TEXT = 4096
_FLOAT = 4
# Slots that the kernel moves at once, of keys of up to so many dimensions; of wider ones fewer.
_MOST_MOVED, _MOVED_DIMS = 64, 256


class Need(NamedTuple):
    """Bytes: of the stored weights, of one text's float32 keys, values and states, and of what a forward holds."""

    weights: int
    cache: int
    work: int


def needed(a: Architecture, weights: int) -> Need:
    """What a model of `weights` bytes needs beside them, for one text of 4096 tokens or as many as it has positions.

    work: a prompt's rows through a block, the logits of the widest forward that is captured, and the largest layer once
    more at 4 bytes a weight, which is what laying it out takes. The experts of one block are held twice while they are
    stacked: at most a block's share of the weights.
    """
    groups = a.cache_shape.groups
    held = sum(layers * heads * (dim + (dim if a.latent is None else a.value_dim)) for layers, heads, dim in groups)
    floats = sum(a.state_sizes)
    cache = min(a.max_positions, _TEXT) * held * _FLOAT + bytes_of_states(floats) + bytes_of_snapshots(floats)
    row = (
        4 * a.hidden
        + (2 * a.heads + 2 * a.kv_heads) * max((dim for _, _, dim in groups), default=0)
        + 3 * a.intermediate
    )
    logits = 2 * WIDEST * a.vocab
    largest = a.hidden * max(a.vocab, 2 * a.intermediate)
    moved = 0 if a.experts is None else weights // a.layers
    return Need(weights, cache, _FLOAT * (_PROMPT_ROWS * row + logits + largest) + moved)


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that this process can still take: what is free, and what torch holds and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_room(name: str, need: Need, free: int) -> None:
    """Raises UserError where a model does not fit `free` bytes."""
    if sum(need) > free:
        raise UserError(
            f"{name} needs about {_shown(sum(need))} of the GPU ({_shown(need.weights)} of weights,"
            f" {_shown(need.cache)} for one text's cache, {_shown(need.work)} to work with), and"
            f" {_shown(free)} are free;"
            " compress it to a smaller scheme, free the GPU's memory, or load it with device='cpu'"
        )


def require_pages(pages: int, size: int, free: int) -> None:
    """Raises UserError where so many pages of `size` bytes do not fit `free` bytes."""
    if pages * size > free:
        raise UserError(
            f"a cache of {pages} pages needs {_shown(pages * size)} of the GPU, and {_shown(free)} are free; take at"
            f" most {free // size} pages, fewer or shorter texts, or another kind of cache (int8, int4)"
        )


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


class GpuCache(PagedCache):
    """A PagedCache on a device. Without `pages` it promises each request its whole capacity, and grows to hold that.

    A pool that grows moves: `memory` is another object then, and graphs captured on the old one are of no use.
    """

    def __init__(self, form: CacheFormat | tuple[CacheFormat, ...], pages: int | None = None):
        """`pages` of 64 tokens, taken now; None: as many as the open requests may come to need.

        Raises UserError where the device does not have the memory.
        """
        super().__init__(form, 1 if pages is None else pages)
        self._grows = pages is None
        self._promised = 0
        self._tables: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)

    @property
    def memory(self) -> Store:
        """The first of `memories`, which all move at once: what graphs belong to."""
        return self._memory[0]

    @property
    def memories(self) -> tuple[Store, ...]:
        """All pages as they lie now, and behind them the scratch page; one for each shape of keys."""
        return self._memory

    @property
    def scratch(self) -> int:
        """The page that takes what nobody reads."""
        return self._pages.total

    def open(self, capacity: int) -> int:
        """See PagedCache. A pool that grows does it here: a forward never finds it too small."""
        blocks = blocks_for(capacity)
        self._promise(blocks)
        handle = super().open(capacity)
        self._promised += blocks
        return handle

    def fork(self, request: int) -> int:
        """See PagedCache: shares all pages; the copies that writing may need are promised too."""
        blocks = self.capacity(request) // KEY_BLOCK
        self._promise(blocks)
        handle = super().fork(request)
        self._promised += blocks
        return handle

    def close(self, request: int) -> None:
        blocks = self.capacity(request) // KEY_BLOCK
        super().close(request)
        self._promised -= blocks

    def tables(self, requests: Sequence[int], blocks: int, out: NDArray[np.int32]) -> None:
        """Writes the pages of the requests' first `blocks` blocks into `out` (requests or more, blocks).

        Entries behind a request's blocks, and rows behind the requests, are valid pages whose keys nobody may read.
        """
        width = min(blocks, self._tables.shape[1])
        out.fill(self.scratch)
        out[: len(requests), :width] = self._tables[list(requests), :width]

    def slots(self, request: int, start: int, count: int) -> NDArray[np.int32]:
        """Where `count` of the request's slots from `start` lie in the memory: page · 64 + place."""
        slots = np.arange(start, start + count, dtype=np.int32)
        return self._tables[request, slots // KEY_BLOCK] * KEY_BLOCK + slots % KEY_BLOCK

    def _move(self, stores: tuple[Store, ...], source: Tensor, target: Tensor) -> None:
        """See KeyValueCache: on CUDA in one launch, where a path is no longer than that takes."""
        wide = max(form.head_dim for form in self.formats)
        if self.format.device.type != "cuda" or len(source) * max(wide, _MOVED_DIMS) > _MOST_MOVED * _MOVED_DIMS:
            super()._move(stores, source, target)
            return
        from runtime.kernels.triton.kv_store import move

        where = torch.stack((source, target)).to(self.format.device, non_blocking=True)
        for store in stores:
            move(store, self.format.kind, where[0], where[1])

    def _promise(self, blocks: int) -> None:
        """Makes room for a request of so many blocks beside the open ones, where the pool may grow."""
        needed = self._promised + blocks
        if not self._grows or needed <= self.pages:
            return
        total = max(needed, self.pages + self.pages // 2)
        before = self._memory
        if self._held or self._pages.known:
            self._memory = self._allocate(total)
            for old, new in zip(_parts(before), _parts(self._memory), strict=True):
                if old.numel():
                    new[:, : self.pages] = old[:, : self.pages]
        else:
            # Nothing to keep: the old memory goes first, so that the new pool may be all that fits.
            del before
            self._memory = self._allocate(0)
            try:
                self._memory = self._allocate(total)
            except BaseException:
                self._memory = self._allocate(self.pages)
                raise
        self._pages.grow(total)
        for request, stores in self._store.items():
            self._store[request] = tuple(replace(store, table=stores[0].table) for store in self._memory)

    def _allocate(self, blocks: int) -> tuple[Store, ...]:
        """See KeyValueCache: with the scratch page."""
        if self.format.device.type == "cuda":
            require_pages(blocks + 1, KEY_BLOCK * self.bytes_per_token(), free_bytes(self.format.device))
        return super()._allocate(blocks + 1)

    def _add(self, stores: tuple[Store, ...], length: int, origin: int | None = None) -> int:
        handle, table = super()._add(stores, length, origin), stores[0].table
        assert table is not None
        rows, blocks = self._tables.shape
        if handle >= rows or len(table) > blocks:
            grown = np.full((max(handle + 1, rows), max(len(table), blocks)), self.scratch, dtype=np.int32)
            grown[:rows, :blocks] = self._tables
            self._tables = grown
        self._tables[handle] = self.scratch
        return handle

    def _put(self, request: int, block: int, page: int) -> None:
        super()._put(request, block, page)
        self._tables[request, block] = page


def _parts(memory: tuple[Store, ...]) -> list[Tensor]:
    return [part for store in memory for part in store.parts]
