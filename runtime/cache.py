"""The contiguous key/value cache: each request's keys lie in order of their slot, in whole key blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.kernels.reference import KEY_BLOCK


class ContiguousCache:
    """Float32 keys and values of any number of requests; one buffer per request, for all layers.

    Layout per request: (layers, 2, blocks, kv_heads, KEY_BLOCK, head_dim). Truncation only moves the length: what lies
    behind it is never read, because a row sees keys by position alone.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, device: torch.device):
        self.layers, self.kv_heads, self.head_dim, self.device = layers, kv_heads, head_dim, device
        self._store: dict[int, Tensor] = {}
        self._length: dict[int, int] = {}

    def open(self, capacity: int) -> int:
        """A handle for a request of at most `capacity` tokens. Raises UserError where memory does not hold them."""
        if capacity < 1:
            raise UserError(f"a cache needs room for at least 1 token, {capacity} were asked for")
        handle = next(i for i in range(len(self._store) + 1) if i not in self._store)
        blocks = -(-capacity // KEY_BLOCK)
        shape = (self.layers, 2, blocks, self.kv_heads, KEY_BLOCK, self.head_dim)
        try:
            self._store[handle] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        except (RuntimeError, MemoryError) as error:
            size = capacity * self.bytes_per_token() / 1e9
            raise UserError(f"a cache of {capacity} tokens needs {size:.1f} GB, which this machine refused") from error
        self._length[handle] = 0
        return handle

    def close(self, request: int) -> None:
        """Frees the request's memory."""
        del self._store[request], self._length[request]

    def length(self, request: int) -> int:
        """Tokens stored."""
        return self._length[request]

    def capacity(self, request: int) -> int:
        """Tokens that fit, whole blocks."""
        return self._store[request].shape[2] * KEY_BLOCK

    def truncate(self, request: int, length: int) -> None:
        """Drops all but the first `length` tokens."""
        if not 0 <= length <= self._length[request]:
            raise ValueError(f"cannot truncate {self._length[request]} tokens to {length}")
        self._length[request] = length

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keeps the first `length` tokens and the slots length + path[i], moved together in that order."""
        held = self._length[request]
        if any(not 0 <= step < held - length for step in path):
            raise ValueError(f"slots {list(path)} after {length} are not all among the {held} stored")
        source = torch.tensor([length + step for step in path], dtype=torch.long)
        target = torch.arange(length, length + len(path))
        store = self._store[request]
        # Indexing copies before it assigns, so overlapping moves are safe.
        moved = store[:, :, source // KEY_BLOCK, :, source % KEY_BLOCK]
        store[:, :, target // KEY_BLOCK, :, target % KEY_BLOCK] = moved
        self._length[request] = length + len(path)

    def reserve(self, request: int, count: int) -> int:
        """Takes `count` slots behind the last token and returns the first of them."""
        start = self._length[request]
        if start + count > self.capacity(request):
            raise ValueError(f"{start} + {count} tokens do not fit a cache of {self.capacity(request)}")
        self._length[request] = start + count
        return start

    def write(self, layer: int, request: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, kv_heads, head_dim) of consecutive slots from `start`."""
        slots = torch.arange(start, start + keys.shape[0], device=self.device)
        block, inside = slots // KEY_BLOCK, slots % KEY_BLOCK
        self._store[request][layer, 0, block, :, inside] = keys
        self._store[request][layer, 1, block, :, inside] = values

    def read(self, layer: int, request: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The blocks that hold the first `tokens` slots: keys and values (blocks, kv_heads, KEY_BLOCK, head_dim)."""
        blocks = -(-tokens // KEY_BLOCK)
        return self._store[request][layer, 0, :blocks], self._store[request][layer, 1, :blocks]

    def gather(self, layer: int, request: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots in the given order, as `read` lays them out (the rest of a block zero)."""
        count = len(slots)
        blocks = -(-count // KEY_BLOCK)
        out = []
        for part in (0, 1):
            rows = self._store[request][layer, part, slots // KEY_BLOCK, :, slots % KEY_BLOCK]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, blocks * KEY_BLOCK - count))
            out.append(padded.view(blocks, KEY_BLOCK, self.kv_heads, self.head_dim).transpose(1, 2))
        return out[0], out[1]

    def bytes_per_token(self) -> int:
        """Float32 keys and values over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4
