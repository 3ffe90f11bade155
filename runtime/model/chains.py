"""What decoders that a library runs have in common: one chain of tokens after the other, each with a cache of its own.

A library's kernels pick their order of operations by shape, so the lossless class is `measured`, not `exact`.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.cache.apart import SharesNothing
from runtime.contract import UNCALIBRATED, Cache, CacheKind, Decoder, Out, Rows, StateKind
from runtime.errors import UserError


class ChainCache(SharesNothing):
    """A library's own cache for each request, as the decoder makes, cuts and copies it."""

    def __init__(self, decoder: "ChainDecoder"):
        self.decoder = decoder
        self.held: dict[int, Any] = {}

    def open(self, capacity: int) -> int:
        """A handle; libraries' caches grow, so `capacity` reserves nothing."""
        return self._add(self.decoder.empty())

    def close(self, request: int) -> None:
        del self.held[request]

    def fork(self, request: int) -> int:
        return self._add(self.decoder.copied(self.held[request]))

    def length(self, request: int) -> int:
        return self.decoder.length(self.held[request])

    def truncate(self, request: int, length: int) -> None:
        held = self.length(request)
        if not 0 <= length <= held:
            raise ValueError(f"cannot truncate {held} tokens to {length}")
        if length < held:
            self.held[request] = self.decoder.cut(self.held[request], length)

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keeps a prefix of a chain; other paths need a tree, which `forward` refuses here."""
        if list(path) != list(range(len(path))):
            raise ValueError("this cache keeps chains only")
        self.truncate(request, length + len(path))

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the library's dtype."""
        return self.decoder.bytes_per_token()

    def _add(self, state: Any) -> int:
        handle = next(i for i in range(len(self.held) + 1) if i not in self.held)
        self.held[handle] = state
        return handle


class ChainDecoder(Decoder):
    """A `Decoder` over a library whose caches are `Any`; requests run one after the other.

    no_kinds, no_trees  what is told where a quantised or paged cache, or a tree, is asked for.
    no_drafts           why no draft can be verified; "" where it can.
    """

    exact = False
    kv = UNCALIBRATED
    no_kinds: str
    no_trees: str

    @property
    def no_drafts(self) -> str:
        """ "": chains of drafts are verified."""
        return ""

    @abstractmethod
    def empty(self) -> Any:
        """A request's cache before its first token."""

    @abstractmethod
    def length(self, state: Any) -> int:
        """Tokens in a request's cache."""

    @abstractmethod
    def cut(self, state: Any, length: int) -> Any:
        """A request's cache with its first `length` tokens alone, fewer than it has."""

    def copied(self, state: Any) -> Any:
        """A request's cache that goes its own way from here."""
        return copy.deepcopy(state)

    @abstractmethod
    def bytes_per_token(self) -> int:
        """See contract.Cache."""

    @abstractmethod
    def run(self, tokens: Tensor, state: Any, at: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Appends a chain to a request's cache; of each row `at` logits (V,) and, where it has any, hidden states."""

    def new_cache(
        self, kind: CacheKind = "float32", pages: int | None = None, states: StateKind = "float32"
    ) -> ChainCache:
        """An empty cache. Raises UserError for quantised and paged ones, and for states in float16."""
        if states != "float32":
            raise UserError("states in float16 need our own kernels, and another runtime decodes this; leave them out")
        if kind != "float32" or pages is not None:
            raise UserError(self.no_kinds)
        return ChainCache(self)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises UserError for trees."""
        if not isinstance(cache, ChainCache) or cache.decoder is not self:
            raise TypeError(f"this decoder needs the cache of its new_cache(), not {type(cache).__name__}")
        wanted = range(len(tokens)) if logits_at is None else logits_at.tolist()
        found: dict[int, tuple[Tensor, ...]] = {}
        for request, first, end in chains(rows, cache, self.no_trees):
            at = sorted({row - first for row in wanted if first <= row < end})
            given = self.run(tokens[first:end], cache.held[request], at)
            found.update(zip((first + row for row in at), given, strict=True))
        if not found:
            return Out(torch.empty(0, self.vocab_size), torch.empty(0, self.hidden_size))
        logits, *hidden = (torch.stack(part).float() for part in zip(*(found[row] for row in wanted), strict=True))
        return Out(logits, hidden[0] if hidden else torch.empty(0, 0))


def chains(rows: Rows, cache: Cache, refusal: str) -> Iterator[tuple[int, int, int]]:
    """Each request with its first row and the one behind its last, checked when its turn comes.

    Raises UserError with the sentence `refusal` where a row follows another than the one before it, and ValueError for
    rows that do not go on where the cache ends.
    """
    request, parent, position = rows.request.tolist(), rows.parent.tolist(), rows.position.tolist()
    first = 0
    while first < len(request):
        end = first + 1
        while end < len(request) and request[end] == request[first]:
            end += 1
        if parent[first:end] != [-1, *range(first, end - 1)]:
            raise UserError(refusal)
        if position[first] != cache.length(request[first]):
            raise ValueError(f"row {first} is at position {position[first]}, the cache ends at another")
        yield request[first], first, end
        first = end
