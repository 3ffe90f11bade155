"""What the record says in one native call per forward: reference.py's meaning, nothing of Python inside the layers."""

import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import (
    Reserved,
    checked_cache,
    extend_states,
    learn_drafts,
    require_tokens,
    reserve,
    reserve_drafts,
)
from runtime.checkpoints.architecture import Architecture
from runtime.contract import (
    UNCALIBRATED,
    Cache,
    CacheKind,
    CacheScheme,
    ChainNoise,
    Greedy,
    Out,
    Rows,
    StateKind,
    integers,
)
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.model.base import BaseDecoder
from runtime.model.layers import Parts
from runtime.model.native_batch import Batches, int64
from runtime.model.native_model import TABLES, NativeModel, address
from runtime.native.binding import CACHES, require
from runtime.native.structs import AnglesStruct, ChainNoiseStruct, TakenStruct
from runtime.sampling.distribution import finite_argmax

# Dimensions of a head (attention.cpp) and experts of a layer (rows.cpp) that the kernels have room for.
MOST = 1024


class _Hidden(threading.local):
    """A thread's memory of hidden states that are good until its next forward."""

    def __init__(self, size: int) -> None:
        self._whole = torch.empty((0, size))
        self._parts: dict[int, tuple[Tensor, int]] = {}

    def rows(self, count: int) -> tuple[Tensor, int]:
        """(count, hidden) float32, and where it lies."""
        found = self._parts.get(count)
        if found is None:
            if count > len(self._whole):
                self._whole, self._parts = torch.empty((max(8, 2 * count), self._whole.shape[1])), {}
            part = self._whole[:count]
            found = self._parts[count] = part, part.data_ptr()
        return found


class NativeDecoder(BaseDecoder):
    """A `Decoder` on native kernels: a row's bits are the same at every width, on any number of threads."""

    def __init__(
        self, architecture: Architecture, config: Any, parts: Parts, kernel: Kernel, kv: CacheScheme = UNCALIBRATED
    ):
        """Without `parts.embedding` its rows are the head's (tied, float). Raises UserError for sizes beyond the
        kernels'."""
        experts = 0 if architecture.experts is None else architecture.experts.count
        widest = max((group.shape.head_dim for group in architecture.key_groups), default=architecture.head_dim)
        for key, found in (("head_dim", widest), ("the number of experts", experts)):
            if found > MOST:
                raise UserError(
                    f"config.json: {key} is {found}, and the native kernels hold at most {MOST};"
                    " use kernels='reference'"
                )
        if parts.embedding is not None and parts.embedding.dtype not in TABLES:
            parts = replace(parts, embedding=parts.embedding.float())
        super().__init__(architecture, config, parts, kernel, kv)
        self._native: dict[CacheKind, NativeModel] = {}
        self._batches, self._hidden = Batches(), _Hidden(self.hidden_size)
        # The cache of the last forward, which is not to be kept alive, and what ran it.
        self._last: tuple[Callable[[], KeyValueCache | None], NativeModel | None] = (lambda: None), None
        # What `_angles` made last: for positions below which, and what it points to.
        self._made: tuple[int, AnglesStruct, Any] = 0, AnglesStruct(), ()

    @property
    def experts_read(self) -> int:
        """How many experts' weights forwards have read so far; one that several rows share counts once a forward."""
        return sum(int(require().specpress_experts_read(each.handle)) for each in self._native.values())

    def new_cache(
        self, kind: CacheKind = "float32", pages: int | None = None, states: StateKind = "float32"
    ) -> KeyValueCache:
        """See BaseDecoder. Raises UserError for float16, which only GPUs take."""
        if kind not in CACHES:
            raise UserError(
                f"the kernels for CPUs hold keys and values in {', '.join(CACHES)}, not in {kind}, which needs a GPU; "
                "choose one of them."
            )
        return super().new_cache(kind, pages, states)

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises TypeError and ValueError as slots.checked_cache and slots.reserve."""
        (held, model), count = self._checked(tokens, rows, cache, logits_at), len(rows)
        if count == 0:
            nothing = torch.empty((0, len(self.taps) * self.hidden_size)) if self.taps else None
            return Out(torch.empty((0, self.vocab_size)), torch.empty((0, self.hidden_size)), nothing)
        self._recall_states(rows, held)
        reserved = reserve(rows, held)
        extend_states(reserved, tokens, held, logits_at)
        fed = int64(tokens)
        batch, kept = self._batches.of(reserved, fed.data_ptr(), rows, held)
        angles = self._angles(_behind(reserved) - 1)
        at = self._batches.constants(count)[2] if logits_at is None else int64(logits_at)
        asked = count if logits_at is None else at.numel()
        # Uninitialised: the kernels write every element.
        logits, hidden = torch.empty((asked, self.vocab_size)), torch.empty((asked, self.hidden_size))
        taken, into = self._taken(count)
        outputs = hidden.data_ptr(), logits.data_ptr(), into, None
        require().specpress_forward(model.handle, byref(batch), byref(angles), at.data_ptr(), asked, *outputs)
        del kept
        return Out(logits, hidden, taken)

    def forward_greedy(
        self, tokens: Sequence[int], rows: Rows, cache: Cache, logits_at: Sequence[int] | None = None
    ) -> Greedy:
        """See contract.GreedyRows: no tensor is made but of states that are taken, which small models feel."""
        last, model = self._last  # read once: another thread's forward may put another one there
        held = last()
        count, places = len(rows), range(1) if logits_at is None else logits_at
        usual = len(tokens) == count > 0 and min(tokens) >= 0 and max(tokens) < self.vocab_size
        usual = usual and len(places) > 0 and min(places) >= 0 and max(places) < count
        if held is not cache or held is None or model is None or held.format.state or not usual:
            # Another cache than before, states, or what `forward` refuses.
            out = self.forward(integers(tokens), rows, cache, None if logits_at is None else integers(logits_at))
            return Greedy(finite_argmax(out.logits), out.hidden, out.taken)
        reserved, fed = reserve(rows, held), (c_int64 * count)(*tokens)
        batch, kept = self._batches.of(reserved, addressof(fed), rows, held)
        angles = self._angles(_behind(reserved) - 1)
        order, asked = self._batches.constants(count)[2], count if logits_at is None else len(logits_at)
        at: Any = order.data_ptr() if logits_at is None else (c_int64 * asked)(*logits_at)
        best, (hidden, into_hidden), (taken, into) = (c_int64 * asked)(), self._hidden.rows(asked), self._taken(count)
        outputs = into_hidden, None, into, best
        require().specpress_forward(model.handle, byref(batch), byref(angles), at, asked, *outputs)
        del kept, order
        return Greedy(best[:], hidden, taken)

    def _taken(self, count: int) -> tuple[Tensor | None, Any]:
        """The states of `count` rows that are to be taken, and what tells the kernels so."""
        if not self.taps:
            return None, None
        taken = torch.empty((count, len(self.taps) * self.hidden_size))
        return taken, byref(TakenStruct(len(self.taps), self._tap_numbers.data_ptr(), taken.data_ptr()))

    def continue_greedy(self, tokens: Tensor, rows: Rows, cache: Cache, steps: Sequence[int], limit: int) -> Tensor:
        """See contract.GreedyChains. The tokens are those that `forward` would lead to, step by step: the same bits."""
        return self.continue_sampled(tokens, rows, cache, steps, limit, ())

    def continue_sampled(
        self,
        tokens: Tensor,
        rows: Rows,
        cache: Cache,
        steps: Sequence[int],
        limit: int,
        noise: Sequence[ChainNoise | None],
    ) -> Tensor:
        """See contract.SampledChains; without any noise all are greedy."""
        drawn, pointers = _noise(noise, steps, limit)
        held, model = self._checked(tokens, rows, cache, None)
        self._recall_states(rows, held)
        reserved = reserve_drafts(rows, held, steps, limit, self.vocab_size)
        if not reserved:
            return torch.empty((0, 0), dtype=torch.int64)
        extend_states(reserved, tokens, held, further=[count - 1 for count in steps])
        fed = int64(tokens)
        batch, kept = self._batches.of(reserved, fed.data_ptr(), rows, held)
        angles = self._angles(max(r.start + r.count + s for r, s in zip(reserved, steps, strict=True)) - 2)
        wanted, longest = integers(steps), max(steps)
        drafted = torch.full((len(steps), longest), -1, dtype=torch.int64)
        finite = require().specpress_draft(
            *(model.handle, byref(batch), byref(angles), len(steps), wanted.data_ptr(), limit),
            *(drafted.data_ptr(), longest, drawn),
        )
        del kept, pointers
        if not finite:
            raise FloatingPointError("a row of logits holds NaN or Inf")
        learn_drafts(reserved, drafted, steps, held)
        return drafted

    def _run_again(self, tokens: Tensor, chain: Reserved, cache: KeyValueCache) -> None:
        rows = Rows.chains([(chain.request, chain.start, chain.count)])
        fed = int64(tokens)
        batch, kept = self._batches.of([chain], fed.data_ptr(), rows, cache)
        angles = self._angles(chain.start + chain.count - 1)
        handle = self._found(cache).handle
        require().specpress_forward(handle, byref(batch), byref(angles), None, 0, *[None] * 4)
        del kept

    @cached_property
    def _tap_numbers(self) -> Tensor:
        """`taps`, which stay, as the kernels read them."""
        return integers(self.taps)

    def _angles(self, position: int) -> AnglesStruct:
        """What depends on positions up to this one; made anew when a table has to grow."""
        # Not read back after making: another thread's forward may put a shorter one there.
        made = self._made
        if position >= made[0]:
            tables, growth = self._rotary.upto(position), self._rotary.growth(position)
            columns = [(c_void_p * len(tables))(*[pair[part].data_ptr() for pair in tables]) for part in (0, 1)]
            reach = [cos.shape[0] for cos, _ in tables] + ([] if growth is None else [growth.shape[0]])
            struct = AnglesStruct(*columns, address(growth))
            made = self._made = min(reach, default=sys.maxsize), struct, (tables, growth)
        return made[1]

    def _checked(
        self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None
    ) -> tuple[KeyValueCache, NativeModel]:
        """The cache, and what runs it; raises as slots.checked_cache. The last one is not checked again."""
        last, model = self._last
        held = last()
        if held is cache and held is not None and model is not None:
            require_tokens(tokens, len(rows), logits_at, self.vocab_size)
            return held, model
        held = checked_cache(tokens, rows, cache, logits_at, self.architecture)
        model = self._found(held)
        self._last = ref(held), model
        return held, model

    def _found(self, cache: KeyValueCache) -> NativeModel:
        kind = cache.format.kind
        if kind not in self._native or not self._native[kind].fits(cache.formats):
            self._native[kind] = NativeModel(self.architecture, self.parts, self.kernel, self._rotary, cache.formats)
        return self._native[kind]


def _behind(reserved: Sequence[Reserved]) -> int:
    """The position behind the last one of all rows."""
    if len(reserved) == 1:
        return reserved[0].start + reserved[0].count
    return max(r.start + r.count for r in reserved)


def _noise(noise: Sequence[ChainNoise | None], steps: Sequence[int], limit: int) -> tuple[Any, list[Any]]:
    """The noise of each request's chain as the kernels read it, None without any, and what it points to."""
    if not noise:
        return None, []
    found, pointers = (ChainNoiseStruct * len(noise))(), []
    for struct, own, count in zip(found, noise, steps, strict=True):
        if own is None:
            continue
        if len(own.steps) < count or min(map(len, own.steps), default=0) < limit:
            raise ValueError(f"a chain of {count} tokens needs noise for each, of {limit} numbers")
        struct.temperature = own.temperature
        pointers.append((c_void_p * count)(*(step.ctypes.data for step in own.steps[:count])))
        struct.steps = addressof(pointers[-1])
    return found, pointers
