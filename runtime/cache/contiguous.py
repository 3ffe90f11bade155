"""Key/value caches of the native and the reference decoder: what all have in common, and the contiguous one.

A request's keys lie in order of their slot, in blocks of 64. Truncation only moves the length: what lies behind it is
never read, because a row sees keys by position alone. A quantised cache has no full-precision part: every row reads
rounded keys and values, its own included, so rolling back is exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.cache.apart import SharesNothing
from runtime.cache.quantizer import CacheFormat
from runtime.cache.states import States
from runtime.checkpoints.record import CacheShape
from runtime.contract import CacheBasis, integers
from runtime.devices import explained
from runtime.errors import UserError
from runtime.kv_store import KEY_BLOCK, Store, allocate


class KeyValueCache(ABC):
    """A `contract.Cache` whose subclasses say where their blocks lie.

    Layers of one shape lie in one `Store`; their numbers go on from one of `formats` to the next.

    `open` raises UserError where the cache cannot hold a request, `match_prefix` ValueError for one that is not new.
    """

    def __init__(self, form: CacheFormat | tuple[CacheFormat, ...]):
        """One format for each shape that keys have."""
        self.formats = (form,) if isinstance(form, CacheFormat) else form
        self.format = self.formats[0]
        self.shape = CacheShape(tuple((f.layers, f.kv_heads, f.head_dim) for f in self.formats), self.format.state)
        self._places = tuple((group, layer) for group, of in enumerate(self.formats) for layer in range(of.layers))
        self._store: dict[int, tuple[Store, ...]] = {}
        self._length: dict[int, int] = {}
        self._states: dict[int, States] = {}

    @abstractmethod
    def open(self, capacity: int) -> int: ...

    def close(self, request: int) -> None:
        """Frees what the request holds; its handle may be given out again."""
        del self._store[request], self._length[request]
        self._states.pop(request, None)

    @abstractmethod
    def fork(self, request: int) -> int: ...

    @property
    @abstractmethod
    def pages(self) -> int: ...

    @property
    @abstractmethod
    def pages_free(self) -> int: ...

    @abstractmethod
    def match_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> int: ...

    @abstractmethod
    def cache_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> None: ...

    @abstractmethod
    def piece_end(self, request: int, end: int, length: int) -> int: ...

    @abstractmethod
    def missing_pages(self, needs: Mapping[int, int]) -> int: ...

    def store(self, request: int, group: int = 0) -> Store:
        """The request's memory of the layers of one format."""
        return self._store[request][group]

    def stores(self, request: int) -> tuple[Store, ...]:
        """The request's memory, format by format."""
        return self._store[request]

    def basis(self, layer: int) -> CacheBasis | None:
        """What a layer's keys and values are written in, (kv_heads, 3, d, d) each; None: as they are."""
        group, own = self._places[layer]
        found = self.formats[group].basis
        return None if found is None else CacheBasis(found.keys[own], found.values[own])

    def states(self, request: int) -> States | None:
        """Those of its last tokens, where the model's layers have such."""
        return self._states.get(request)

    def length(self, request: int) -> int:
        return self._length[request]

    def capacity(self, request: int) -> int:
        """Tokens that fit, whole blocks."""
        return self._store[request][0].capacity

    def truncate(self, request: int, length: int) -> None:
        if not 0 <= length <= self._length[request]:
            raise ValueError(f"cannot truncate {self._length[request]} tokens to {length}")
        self._length[request] = length
        if self._states:
            self._states[request].truncate(length)

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keeps the first `length` tokens and the slots length + path[i], moved together in that order.

        Raises ValueError for slots that are not stored.
        """
        held = self._length[request]
        if not 0 <= length <= held or any(not 0 <= step < held - length for step in path) or len(path) > held - length:
            raise ValueError(f"slots {list(path)} after {length} are not all among the {held} stored")
        moves = [(length + step, length + place) for place, step in enumerate(path) if step != place]
        if moves:
            source, target = (integers(slots) for slots in zip(*moves, strict=True))
            self._own(request, {slot // KEY_BLOCK for _, slot in moves})
            stores = self._store[request]
            self._move(stores, stores[0].physical(source), stores[0].physical(target))
            if self._states:
                self._states[request].keep(length, path)
        self.truncate(request, length + len(path))

    def reserve(self, request: int, count: int) -> int:
        """Takes `count` slots behind the last token and returns the first of them.

        Raises ValueError beyond the request's capacity, and OutOfPages; the cache is as it was then.
        """
        start = self._length[request]
        if start + count > self.capacity(request):
            raise ValueError(f"{start} + {count} tokens do not fit a cache of {self.capacity(request)}")
        self._own(request, blocks_of(start, count))
        self._length[request] = start + count
        return start

    def _move(self, stores: tuple[Store, ...], source: Tensor, target: Tensor) -> None:
        """Copies slots of the memory (n,) in all layers, int64 on the CPU."""
        for form, store in zip(self.formats, stores, strict=True):
            form.move(store, source, target)

    @abstractmethod
    def _own(self, request: int, blocks: Iterable[int]) -> None:
        """Called before slots in these blocks are written: nobody else may read them."""

    def write(self, layer: int, request: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, kv_heads, head_dim) of consecutive reserved slots from `start`."""
        group, number = self._places[layer]
        store = self._store[request][group]
        slots = store.physical(torch.arange(start, start + keys.shape[0])).to(self.format.device)
        self.formats[group].write(store, number, slots, keys, values)

    def read(self, layer: int, request: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The blocks that hold the first `tokens` slots: float32 keys and values (blocks, kv_heads, 64, head_dim)."""
        blocks = -(-tokens // KEY_BLOCK)
        group, number = self._places[layer]
        store, form = self._store[request][group], self.formats[group]
        keys, values = form.read(store, number, store.first(blocks))
        if store.table is not None:
            # A page may come from a request that overflowed, and an infinity times a weight of 0 is no number.
            values[blocks - 1 :, :, tokens - (blocks - 1) * KEY_BLOCK :] = 0
        return keys.transpose(-1, -2), values[..., : form.values]

    def gather(self, layer: int, request: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots in the given order, as `read` lays them out (the rest of a block zero)."""
        count = len(slots)
        blocks = -(-count // KEY_BLOCK)
        out = []
        for part in self.read(layer, request, int(slots.max()) + 1):
            rows = part[slots // KEY_BLOCK, :, slots % KEY_BLOCK]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, blocks * KEY_BLOCK - count))
            out.append(padded.view(blocks, KEY_BLOCK, *rows.shape[1:]).transpose(1, 2))
        return out[0], out[1]

    def bytes_per_token(self) -> int:
        return sum(form.bytes_per_token for form in self.formats)

    def _allocate(self, blocks: int) -> tuple[Store, ...]:
        """Raises UserError where the machine has no such memory."""
        form = self.format
        try:
            return tuple(
                allocate(of.kind, of.layers, blocks, of.kv_heads, of.head_dim, of.device, of.value_dim)
                for of in self.formats
            )
        except (RuntimeError, MemoryError) as error:
            meant = explained(error)
            if meant is not None and not isinstance(error, torch.OutOfMemoryError):
                raise meant from error
            free = ""
            if form.device.type == "cuda":
                free = f" and of which {torch.cuda.mem_get_info(form.device)[0] / 1e9:.1f} GB are free"
            tokens = blocks * KEY_BLOCK
            raise UserError(
                f"a cache of {tokens} tokens needs {tokens * self.bytes_per_token() / 1e9:.1f} GB, which this machine"
                f" refused{free}; take a smaller kind of cache, fewer pages or requests, or a shorter text"
            ) from error

    def _add(self, stores: tuple[Store, ...], length: int, origin: int | None = None) -> int:
        """A new request's handle; it begins with the states of `origin`, if it is a copy of that."""
        handle, form = next(i for i in range(len(self._store) + 1) if i not in self._store), self.format
        if form.state:
            about = (form.state_width, form.device, form.state_dtype, form.state_shapes)
            self._states[handle] = States(*about) if origin is None else self._states[origin].copy()
        self._store[handle], self._length[handle] = stores, length
        return handle


class ContiguousCache(SharesNothing, KeyValueCache):
    """Each request has memory of its own, for all the tokens that it may ever hold. Nothing is shared."""

    def open(self, capacity: int) -> int:
        """See KeyValueCache: the memory is taken here."""
        return self._add(self._allocate(blocks_for(capacity)), 0)

    def fork(self, request: int) -> int:
        """See KeyValueCache: a copy."""
        try:
            copied = tuple(Store(*(part.clone() for part in store.parts)) for store in self._store[request])
        except (RuntimeError, MemoryError) as error:
            raise UserError("a copy of a request's cache does not fit this machine's memory") from error
        return self._add(copied, self._length[request], request)

    def _own(self, request: int, blocks: Iterable[int]) -> None:
        """Every block is the request's own."""


def blocks_for(capacity: int) -> int:
    """Blocks of a request of `capacity` tokens. Raises UserError for less than one."""
    if capacity < 1:
        raise UserError(f"a cache needs room for at least 1 token, {capacity} were asked for")
    return -(-capacity // KEY_BLOCK)


def blocks_of(start: int, count: int) -> range:
    """The blocks in which `count` slots from `start` lie."""
    return range(start // KEY_BLOCK, -(-(start + count) // KEY_BLOCK)) if count else range(0)
