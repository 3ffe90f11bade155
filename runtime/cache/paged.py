"""The paged key/value cache: one pool of pages of 64 tokens, shared prefixes, copies on write.

Pages and tables are those of PagedAttention (Kwon et al., 2309.06180). Which page a block lies in changes no bit of
what attention computes: rows see keys by position, and a page's tokens are one block.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from runtime.cache.block_pool import ROOT, BlockPool, Prefix
from runtime.cache.contiguous import KeyValueCache, blocks_for, blocks_of
from runtime.cache.quantizer import CacheFormat
from runtime.cache.snapshots import Snapshots
from runtime.errors import OutOfPages, UserError
from runtime.kv_store import KEY_BLOCK


class PagedCache(KeyValueCache):
    """Requests take pages as they grow and let them go as they shrink.

    A page may be held by several requests, which only read it; who writes into it takes a copy first. Full pages that
    were cached stay after their requests, for others with the same tokens, until their memory is needed. Where layers
    have states, others begin where a page has a snapshot of them (snapshots.py).
    """

    def __init__(self, form: CacheFormat | tuple[CacheFormat, ...], pages: int):
        """Takes the memory of `pages` pages of 64 tokens. Raises UserError where the machine does not have it."""
        super().__init__(form)
        if pages < 1:
            raise UserError(f"a paged cache needs at least 1 page, {pages} were asked for")
        self._memory = self._allocate(pages)
        self._pages = BlockPool(pages)
        # Per request, the pages of its blocks so far. A store's table repeats them where the kernels find them.
        self._held: dict[int, list[int]] = {}
        self._snapshots = Snapshots(self.format.state_width * self.format.state_dtype.itemsize)
        self._parts: dict[int, int] = {}  # per request, up to where known pages held its text when it began

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self._pages.total

    @property
    def pages_free(self) -> int:
        """Pages that no request holds."""
        return self._pages.free

    def holders(self, page: int) -> int:
        """Requests that hold a page."""
        return self._pages.holders(page)

    def table(self, request: int) -> tuple[int, ...]:
        """The pages of the request's blocks."""
        return tuple(self._held[request])

    def open(self, capacity: int) -> int:
        """See KeyValueCache: takes no page yet. Raises UserError for more tokens than the whole pool holds."""
        blocks = blocks_for(capacity)
        if blocks > self.pages:
            raise UserError(
                f"the cache is too small for one request: {capacity} tokens need {blocks} pages of {KEY_BLOCK},"
                f" and it has {self.pages}; give it more pages or ask for fewer tokens"
            )
        return self._add_held(blocks, [], 0)

    def close(self, request: int) -> None:
        """See KeyValueCache: pages that others hold, or that are known, stay."""
        self._let_go(request, 0)
        del self._held[request]
        self._parts.pop(request, None)
        super().close(request)

    def fork(self, request: int) -> int:
        """See KeyValueCache: shares all pages."""
        held = self._held[request]
        for page in held:
            self._pages.share(page)
        return self._add_held(self.capacity(request) // KEY_BLOCK, held, self._length[request], request)

    def match_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> int:
        """See KeyValueCache: as many leading full pages as are known and fit the request.

        One token at least is left over: its forward gives the logits to go on with. Where layers have states, only up
        to the last of these pages that has a snapshot of them.
        """
        if self._length[request]:
            raise ValueError(f"request {request} holds {self._length[request]} tokens; only an empty one can match")
        most = min((len(tokens) - 1) // KEY_BLOCK, self.capacity(request) // KEY_BLOCK)
        parent, found_pages = ROOT, list[int]()
        for content in _contents(tokens, max(most, 0)):
            found = self._pages.find(Prefix(parent, content, salt if parent == ROOT else ""))
            if found is None:
                break
            page, parent = found
            found_pages.append(page)
        self._parts[request] = len(found_pages) * KEY_BLOCK
        while self.format.state and found_pages and found_pages[-1] not in self._snapshots:
            found_pages.pop()
        for block, page in enumerate(found_pages):
            self._pages.share(page)
            self._put(request, block, page)
        if self.format.state and found_pages:
            states = self._states[request]
            states.resume(tokens[: len(found_pages) * KEY_BLOCK], self._snapshots.use(found_pages[-1]))
        self._length[request] = len(self._held[request]) * KEY_BLOCK
        return self._length[request]

    def cache_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> None:
        """See KeyValueCache: full pages only. Raises ValueError for more tokens than are stored."""
        if len(tokens) > self._length[request]:
            raise ValueError(f"{len(tokens)} tokens are to be cached, and {self._length[request]} are stored")
        self._note_state(request)
        parent = ROOT
        held = self._held[request]
        for page, content in zip(held, _contents(tokens, len(tokens) // KEY_BLOCK), strict=False):
            prefix = Prefix(parent, content, salt if parent == ROOT else "")
            parent = self._pages.know(page, prefix)
            if self.format.state and (known := self._pages.find(prefix)) is not None:
                self._snapshots.move(page, known[0])

    def piece_end(self, request: int, end: int, length: int) -> int:
        """See Cache: of layers with states, where the text parts from others', and at its last full page."""
        if not self.format.state:
            return end
        first, parts = self._length[request], self._parts.get(request, 0)
        page = (end - (end == length)) // KEY_BLOCK * KEY_BLOCK
        return next((place for place in (parts, page) if first < place < end), end)

    def reserve(self, request: int, count: int) -> int:
        """See KeyValueCache: what the request holds now has been decided on, so its state may be kept."""
        if self.format.state:
            self._note_state(request)
        return super().reserve(request, count)

    def _note_state(self, request: int) -> None:
        """Keeps the state after the request's last full page, where it is still there."""
        blocks = self._length[request] // KEY_BLOCK
        if not self.format.state or not blocks or (page := self._held[request][blocks - 1]) in self._snapshots:
            return
        states = self._states[request]
        if not states.holds(blocks * KEY_BLOCK):
            return
        # Of a text that grows page by page the last one is enough, unless others part from it there.
        if blocks > 1 and (blocks - 1) * KEY_BLOCK != self._parts.get(request):
            before = self._held[request][blocks - 2]
            if not self._pages.is_known(before):
                self._snapshots.drop(before)
        self._snapshots.add(page, states.place(blocks * KEY_BLOCK - 1))

    def missing_pages(self, needs: Mapping[int, int]) -> int:
        """See KeyValueCache: copies of shared pages count too. Raises KeyError for a handle that is not open."""
        taken = 0
        writers: Counter[int] = Counter()
        for request, count in needs.items():
            held = self._held[request]
            for block in blocks_of(self._length[request], count):
                if block < len(held):
                    writers[held[block]] += 1
                else:
                    taken += 1
        # If all of a page's holders write, the last of them need not copy it.
        copies = sum(min(count, self._pages.holders(page) - 1) for page, count in writers.items())
        return max(0, taken + copies - self._pages.free)

    def truncate(self, request: int, length: int) -> None:
        """See KeyValueCache: lets go of the pages behind."""
        super().truncate(request, length)
        self._let_go(request, -(-length // KEY_BLOCK))

    def _own(self, request: int, blocks: Iterable[int]) -> None:
        """Takes the pages that are missing and copies the shared ones. Raises OutOfPages before it does anything."""
        held = self._held[request]
        wanted = sorted(blocks)
        lacking = sum(b >= len(held) or self._pages.holders(held[b]) > 1 for b in wanted) - self._pages.free
        if lacking > 0:
            raise OutOfPages(lacking, KEY_BLOCK)
        for block in wanted:
            if block >= len(held):
                self._put(request, block, self._take())
            elif self._pages.holders(held[block]) > 1:
                page = self._take()
                self._copy(held[block], page)
                self._pages.release(held[block])
                self._put(request, block, page)
            else:
                self._pages.forget(held[block])
                self._snapshots.drop(held[block])

    def _take(self) -> int:
        """A page of nobody's, whatever was known of what it held."""
        page = self._pages.take()
        self._snapshots.drop(page)
        return page

    def _copy(self, source: int, target: int) -> None:
        for part in (part for store in self._memory for part in store.parts):
            if part.numel():
                part[:, target] = part[:, source]

    def _add_held(self, blocks: int, held: Sequence[int], length: int, origin: int | None = None) -> int:
        """A request of at most `blocks` blocks, holding pages that were taken for it."""
        table = torch.full((blocks,), -1, dtype=torch.long)
        handle = self._add(tuple(replace(store, table=table) for store in self._memory), length, origin)
        self._held[handle] = []
        for block, page in enumerate(held):
            self._put(handle, block, page)
        return handle

    def _put(self, request: int, block: int, page: int) -> None:
        """Writes a page into the request's table, at its end or over another."""
        self._held[request][block : block + 1] = [page]
        table = self._store[request][0].table
        assert table is not None
        table[block] = page

    def _let_go(self, request: int, blocks: int) -> None:
        """Releases all but the first blocks; the last first, so that of known pages a prefix outlives what follows."""
        held = self._held[request]
        while len(held) > blocks:
            self._pages.release(held.pop())


def _contents(tokens: Sequence[int], pages: int) -> list[bytes]:
    """The tokens of the first full pages, as `Prefix` has them."""
    array = np.asarray(tokens[: pages * KEY_BLOCK], dtype=np.int64).reshape(pages, KEY_BLOCK)
    return [row.tobytes() for row in array]
