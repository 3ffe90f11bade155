"""The decoder's contract: rows, not rectangles.

A row is one token of one request at one logical position, after a parent row. Prefill, plain decoding, verifying a
chain or a tree, and batches of all of these at once are the same call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CacheKind = Literal["float32", "float16", "int8", "int4", "int3"]
# What the states of layers that carry one are held in, where a model has such.
StateKind = Literal["float32", "float16", "int8"]
# Those that hold numbers as they are, so that neither scales nor key factors have a meaning.
FLOATS: tuple[CacheKind, ...] = ("float32", "float16")


@dataclass(frozen=True, eq=False)
class CacheBasis:
    """What the keys and values of a group of layers are written in (runtime/kernels/basis.py), float32.

    keys    (layers, kv_heads, 3, head_dim, head_dim): into the basis, the feedback of rounding, and back for queries.
    values  (layers, kv_heads, 3, value_dim, value_dim): likewise, and back for mixed values.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class CacheScheme:
    """What a model's caches are by default.

    kind         how keys and values are held where nobody asks for anything else.
    key_factors  what keys are divided by before they are rounded, of each group of layers of one shape
                 (record.Architecture.key_groups) (layers, kv_heads, head_dim) float32; (): 1.
    bases        what keys and values of four and three bits are written in, of each such group; (): as they are.
    note         why a scheme that the artifact names is not followed; empty where it is, or names none.
    """

    kind: CacheKind = "float32"
    key_factors: tuple[Tensor, ...] = ()
    bases: tuple[CacheBasis, ...] = ()
    note: str = ""

    def factors(self, kind: CacheKind) -> tuple[Tensor, ...]:
        """The key factors of a cache of this kind; none for floats, which have no codes."""
        return () if kind in FLOATS else self.key_factors

    def bases_of(self, kind: CacheKind) -> tuple[CacheBasis, ...]:
        """The bases of a cache of this kind; none where its codes have no use for one."""
        return self.bases if kind in ("int4", "int3") else ()


UNCALIBRATED = CacheScheme()


def integers(values: Sequence[int]) -> Tensor:
    """(n,) int64 on the CPU. For the few numbers of one forward numpy is several times quicker than `torch.tensor`."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


@dataclass(frozen=True)
class Rows:
    """Where the T tokens of one forward stand. All three are (T,) int64 on the CPU.

    request   the cache's handle of the request; rows of one request are adjacent.
    position  logical position in its text (the first token of a text has 0).
    parent    index, in this forward, of the row before it on its path; −1: the last token in the cache.
    """

    request: Tensor
    position: Tensor
    parent: Tensor

    def __len__(self) -> int:
        return self.request.numel()

    @property
    def spans(self) -> Sequence[tuple[int, int, int]] | None:
        """Of rows that were made by `chains`: what they were made of; None: look at the tensors."""
        return None

    @staticmethod
    def chains(spans: Sequence[tuple[int, int, int]]) -> "Rows":
        """Rows of consecutive tokens: one (request, first position, count) per request."""
        return Chains(spans)


class Chains(Rows):
    """Rows of consecutive tokens, which are most of all: their tensors are made when somebody asks for them."""

    spans: Sequence[tuple[int, int, int]] = ()
    _count: int = 0

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        own = self.__dict__  # the tensors that stand for them are frozen
        own["spans"] = spans
        # A forward asks for it several times.
        own["_count"] = spans[0][2] if len(spans) == 1 else sum(count for _, _, count in spans)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def request(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        return integers([handle for handle, _, count in self.spans for _ in range(count)])

    @cached_property
    def position(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        return integers([place for _, start, count in self.spans for place in range(start, start + count)])

    @cached_property
    def parent(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        found: list[int] = []
        for _, _, count in self.spans:
            found += [-1, *range(len(found), len(found) + count - 1)][:count]
        return integers(found)


class Out(NamedTuple):
    """logits (n, vocabulary) float32 and final hidden states (n, hidden) float32 of the n rows that were asked for.

    taken  (T, taps · hidden) float32, of a decoder with `taps` (TakesStates): its residual stream behind so many of its
           layers, side by side in the order of the taps, for every row of the forward; no later forward writes there.
    """

    logits: Tensor
    hidden: Tensor
    taken: Tensor | None = None


class Cache(Protocol):
    """Keys and values of any number of requests."""

    def open(self, capacity: int) -> int:
        """A handle for a new request of at most `capacity` tokens."""

    def close(self, request: int) -> None:
        """Forgets the request; its handle may be given out again."""

    def fork(self, request: int) -> int:
        """A handle for a new request that holds the same tokens and goes its own way from here."""

    @property
    def pages(self) -> int:
        """Pages in all; 0 where it has none."""

    @property
    def pages_free(self) -> int:
        """Pages that no request holds."""

    def match_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> int:
        """Takes over what the cache knows of the beginning of `tokens` for a request that was just opened.

        salt  only what was cached with the same one is known.

        Returns the tokens stored now, at most len(tokens) − 1.
        """

    def cache_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> None:
        """Lets other requests match what is stored; `tokens` are those of the first slots, a chain."""

    def piece_end(self, request: int, end: int, length: int) -> int:
        """Where a piece of a text of `length` tokens that could end behind token `end` is to end.

        So that others with the same beginning, or this one again, find there what they can go on from.
        """

    def missing_pages(self, needs: Mapping[int, int]) -> int:
        """Pages that a forward of needs[request] rows of each request lacks; 0: it fits."""

    def length(self, request: int) -> int:
        """Tokens stored (slots: a tree's rows count each)."""

    def truncate(self, request: int, length: int) -> None:
        """Restores exactly the state of never having seen what follows the first `length` tokens."""

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """After a tree: keeps the first `length` tokens and then the slots length + path[0], length + path[1], …"""

    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""


class Decoder(Protocol):
    """A causal language model over rows."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    kernels: str  # a name of kernels.available(), or "transformers" or "onnxruntime"
    exact: bool  # a row's bits are the same at every width (our kernels); False: `measured`
    device: torch.device
    kv: CacheScheme  # what its artifact says of caches (runtime/cache/scheme.py)

    @property
    def threads(self) -> int:
        """CPU threads that a forward uses."""

    def new_cache(self, kind: CacheKind = "float32", pages: int | None = None, states: StateKind = "float32") -> Cache:
        """An empty cache that `forward` takes: memory for each request, or so many `pages` of 64 tokens for all.

        states  what the layers' states are held in, where they carry such; others than float32 are refused where not.
        """

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """Appends every row to the cache, in order, and returns the rows `logits_at` (T-indices; None: all).

        tokens (T,) int64. Row i attends to what the cache held of its request before the call, its ancestors through
        `parent`, and itself.
        """


def no_drafts(decoder: Decoder) -> str:
    """Why a decoder cannot verify drafts, so that it decodes plainly; "" where it can, as all of ours do."""
    return str(getattr(decoder, "no_drafts", ""))


def no_trees(decoder: Decoder) -> str:
    """Why a decoder takes chains alone, and no rows that branch; "" where it takes trees, as all of ours do."""
    return str(getattr(decoder, "no_trees", ""))


class HasDecoder(Protocol):
    """Anything with a decoder."""

    @property
    def decoder(self) -> Decoder:
        """The model over rows."""


class Loaded(HasDecoder, Protocol):
    """What `runtime.load` returns, as far as decoding needs it."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a text, as the model's configuration says; empty where it says nothing."""


@runtime_checkable
class TakesStates(Decoder, Protocol):
    """What a decoder may offer besides: the residual stream between its layers, for drafters that read it."""

    layers: int

    def tapped(self, taps: Sequence[int]) -> Decoder:
        """This decoder, on the same weights and caches, whose forwards also give `Out.taken`.

        taps  how many layers stand before each place: 0 is the embedding, `layers` what the final norm reads.

        Raises ValueError for a number that is not in 0..layers, or stands there twice.
        """


class Greedy(NamedTuple):
    """The most probable token of each row that was asked for, the first of equals; −1: its logits are no numbers.

    hidden  (n, hidden) float32, good until the thread's next forward; taken: as Out has it.
    """

    tokens: list[int]
    hidden: Tensor
    taken: Tensor | None


@runtime_checkable
class GreedyRows(Protocol):
    """What a decoder may offer besides: forwards whose logits nobody sees."""

    def forward_greedy(
        self, tokens: Sequence[int], rows: Rows, cache: Cache, logits_at: Sequence[int] | None = None
    ) -> Greedy:
        """`forward`, but that of the logits only the largest are told. Raises as `forward`."""


@runtime_checkable
class GreedyChains(Protocol):
    """What a decoder may offer besides: a whole greedy draft in one call."""

    def continue_greedy(self, tokens: Tensor, rows: Rows, cache: Cache, steps: Sequence[int], limit: int) -> Tensor:
        """Appends every row, and then continues each request by itself for steps[i] tokens of its own choosing.

        tokens, rows  as for `forward`; chains, of which each request's last row is continued.
        steps         one number of new tokens, 1 or more, for each request in order.
        limit         only the logits of tokens below it take part; the largest is chosen, the first of equals.

        Returns (requests, max(steps)) int64, −1 behind a request's last token. The cache then holds the rows and all
        new tokens but each request's last.

        Raises FloatingPointError where `forward` would give logits with a NaN, an infinity, or nothing above −inf; the
        cache may then hold any of the tokens. Raises TypeError and ValueError as `forward`; ValueError for rows that
        are no chains, for `steps` that are not 1 or more for each request, and a `limit` that is not in 1..vocabulary.
        """


@dataclass(frozen=True)
class ChainNoise:
    """How a chain is sampled: each token is the first of sampling.noise.race.

    temperature  above 0.
    steps        of each token exponential noise, contiguous float64 of as many numbers as tokens take part, or more.
    """

    temperature: float
    steps: Sequence[NDArray[np.float64]]


@runtime_checkable
class SampledChains(GreedyChains, Protocol):
    """What a decoder may offer besides: a whole sampled draft in one call."""

    def continue_sampled(
        self,
        tokens: Tensor,
        rows: Rows,
        cache: Cache,
        steps: Sequence[int],
        limit: int,
        noise: Sequence[ChainNoise | None],
    ) -> Tensor:
        """`continue_greedy`, but that a request with noise is sampled by it. A token that a rounding decides may be
        another one than `race` finds.

        Raises ValueError where there is not as much noise as tokens are asked for.
        """
