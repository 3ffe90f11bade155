"""The contiguous key/value cache: each request's keys lie in order of their slot, in whole key blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.kernels.reference import KEY_BLOCK
from runtime.kv import VECTOR, CacheKind, Quantizer, Store


class ContiguousCache:
    """Keys and values of any number of requests; one `Store` per request.

    Truncation only moves the length: what lies behind it is never read, because a row sees keys by position alone. A
    quantised cache has no full-precision part: every row reads rounded keys and values, its own included, so rolling
    back is exact.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        kind: CacheKind = "float32",
        key_factor: Tensor | None = None,
    ):
        """`key_factor` (layers, kv_heads, head_dim) float32: keys are divided by it before they are rounded.

        Raises ValueError for a factor of another shape or with entries that are not positive.
        """
        if key_factor is not None:
            shape, least = (layers, kv_heads, head_dim), float(key_factor.min())
            if tuple(key_factor.shape) != shape or not 0 < least <= float(key_factor.max()) < float("inf"):
                raise ValueError(
                    f"key_factor must be {shape} and positive, found {list(key_factor.shape)} from {least}"
                )
        self.layers, self.kv_heads, self.head_dim, self.device = layers, kv_heads, head_dim, device
        self.quantizer = Quantizer(kind, key_factor)
        self.kind = kind
        self._store: dict[int, Store] = {}
        self._length: dict[int, int] = {}

    def open(self, capacity: int) -> int:
        """A handle for a request of at most `capacity` tokens. Raises UserError where memory does not hold them."""
        if capacity < 1:
            raise UserError(f"a cache needs room for at least 1 token, {capacity} were asked for")
        handle = next(i for i in range(len(self._store) + 1) if i not in self._store)
        blocks = -(-capacity // KEY_BLOCK)
        lead = (self.layers, blocks, self.kv_heads)
        wide = -(-self.head_dim // VECTOR) * VECTOR
        dtype, keys, values = {
            "float32": (torch.float32, (self.head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
            "int8": (torch.int8, (self.head_dim, KEY_BLOCK), (KEY_BLOCK, wide)),
            "int4": (torch.uint8, (self.head_dim, KEY_BLOCK // 2), (KEY_BLOCK, wide // 2)),
        }[self.kind]
        scales = (0,) if self.kind == "float32" else (*lead, KEY_BLOCK)
        try:
            self._store[handle] = Store(
                torch.zeros((*lead, *keys), dtype=dtype, device=self.device),
                torch.zeros((*lead, *values), dtype=dtype, device=self.device),
                torch.zeros(scales, device=self.device),
                torch.zeros(scales, device=self.device),
            )
        except (RuntimeError, MemoryError) as error:
            size = capacity * self.bytes_per_token() / 1e9
            raise UserError(f"a cache of {capacity} tokens needs {size:.1f} GB, which this machine refused") from error
        self._length[handle] = 0
        return handle

    def fork(self, request: int) -> int:
        """A handle for a request of its own that holds the same tokens and has the same capacity."""
        handle = next(i for i in range(len(self._store) + 1) if i not in self._store)
        held = self._store[request]
        self._store[handle] = Store(*(getattr(held, part.name).clone() for part in fields(held)))
        self._length[handle] = self._length[request]
        return handle

    def close(self, request: int) -> None:
        """Frees the request's memory."""
        del self._store[request], self._length[request]

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        """Nothing is shared here: 0."""
        return 0

    def publish(self, request: int, tokens: Sequence[int]) -> None:
        """Nothing is shared here."""

    def shortage(self, needs: Mapping[int, int]) -> int:
        """Every request has its memory from the start: 0."""
        return 0

    def store(self, request: int) -> Store:
        """The request's memory, for kernels."""
        return self._store[request]

    def length(self, request: int) -> int:
        """Tokens stored."""
        return self._length[request]

    def capacity(self, request: int) -> int:
        """Tokens that fit, whole blocks."""
        return self._store[request].keys.shape[1] * KEY_BLOCK

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
        self.quantizer.move(self._store[request], source, target)
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
        self.quantizer.write(self._store[request], layer, slots, keys, values)

    def read(self, layer: int, request: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The blocks that hold the first `tokens` slots: float32 keys and values (blocks, kv_heads, 64, head_dim)."""
        blocks = -(-tokens // KEY_BLOCK)
        keys, values = self.quantizer.read(self._store[request], layer, slice(0, blocks))
        return keys.transpose(-1, -2), values[..., : self.head_dim]

    def gather(self, layer: int, request: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots in the given order, as `read` lays them out (the rest of a block zero)."""
        count = len(slots)
        blocks = -(-count // KEY_BLOCK)
        out = []
        for part in self.read(layer, request, int(slots.max()) + 1):
            rows = part[slots // KEY_BLOCK, :, slots % KEY_BLOCK]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, blocks * KEY_BLOCK - count))
            out.append(padded.view(blocks, KEY_BLOCK, self.kv_heads, self.head_dim).transpose(1, 2))
        return out[0], out[1]

    def bytes_per_token(self) -> int:
        """Keys, values and their scales over all layers (what pads a head to whole vectors left out)."""
        per_head = {"float32": self.head_dim * 4, "int8": self.head_dim + 4, "int4": -(-self.head_dim // 2) + 4}
        return self.layers * 2 * self.kv_heads * per_head[self.kind]
