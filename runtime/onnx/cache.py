"""Keys and values of requests on an ONNX Runtime session, which makes new ones in every forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.onnx.signature import Signature


@dataclass
class _Held:
    """One request's keys and values (1, heads, slots, head dim) each; the first `length` slots count."""

    length: int
    states: list[np.ndarray]


class OnnxCache:
    """Keys and values per request, as the session gave them."""

    def __init__(self, taken: Signature):
        self._signature = taken
        self._held: dict[int, _Held] = {}

    def open(self, capacity: int) -> int:
        """A handle; nothing is reserved, because the session makes new keys and values every time."""
        heads, dim = self._signature.shape
        empty = np.zeros((1, heads, 0, dim), dtype=self._signature.dtype)
        return self._add(_Held(0, [empty] * len(self._signature.past)))

    def close(self, request: int) -> None:
        """Frees the request's keys and values."""
        del self._held[request]

    def fork(self, request: int) -> int:
        """A handle for a request that holds the same; nothing is copied, because nothing is ever written to."""
        held = self._held[request]
        return self._add(_Held(held.length, list(held.states)))

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        """0: requests share nothing."""
        return 0

    def publish(self, request: int, tokens: Sequence[int]) -> None:
        """Does nothing, as `adopt`."""

    def shortage(self, needs: Mapping[int, int]) -> int:
        """0: there are no pages."""
        return 0

    def length(self, request: int) -> int:
        """Tokens stored."""
        return self._held[request].length

    def truncate(self, request: int, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        held = self._held[request]
        if not 0 <= length <= held.length:
            raise ValueError(f"cannot truncate {held.length} tokens to {length}")
        held.length = length

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keeps a prefix of a chain; other paths need a tree, which `forward` refuses here."""
        if list(path) != list(range(len(path))):
            raise ValueError("ONNX graphs keep chains only")
        self.truncate(request, length + len(path))

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the graph's dtype."""
        heads, dim = self._signature.shape
        return len(self._signature.past) * heads * dim * self._signature.dtype.itemsize

    def states(self, request: int) -> list[np.ndarray]:
        """Keys and values of exactly the tokens stored, (1, heads, length, head dim)."""
        held = self._held[request]
        return [np.ascontiguousarray(state[:, :, : held.length]) for state in held.states]

    def store(self, request: int, states: Sequence[np.ndarray], length: int) -> None:
        """Takes what a forward gave; slots from `length` on are not the request's."""
        self._held[request] = _Held(length, list(states))

    def _add(self, held: _Held) -> int:
        handle = next(i for i in range(len(self._held) + 1) if i not in self._held)
        self._held[handle] = held
        return handle
