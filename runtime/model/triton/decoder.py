"""What the record says on a GPU: model/reference.py's meaning over kernels in Triton, one graph per shape.

Every intermediate value of a row has an order of operations that depends on the row's position alone, so its bits are
the same whatever shares the call. Nothing here waits for the device but what says so.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.slots import (
    Reserved,
    checked_cache,
    extend_states,
    learn_drafts,
    learn_rows,
    reserve,
    reserve_drafts,
)
from runtime.checkpoints.architecture import Architecture
from runtime.contract import UNCALIBRATED, Cache, CacheKind, CacheScheme, Out, Rows, StateKind
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel
from runtime.kernels.reference import capped
from runtime.kernels.triton.linear import TritonLinear
from runtime.kv_store import KEY_BLOCK
from runtime.model.base import BaseDecoder
from runtime.model.layers import Parts
from runtime.model.on_device import ARGMAX, NON_FINITE, RowSampling
from runtime.model.reference import Turns
from runtime.model.triton.batch import Bucket, Inputs, Staging, Words, bucket_for, depth_of, fill
from runtime.model.triton.cache import WIDEST, GpuCache
from runtime.model.triton.draft_steps import Chains, fill_round, round_for, steps_of
from runtime.model.triton.draft_steps import drafted as draft_round
from runtime.model.triton.graphs import Computed, Graphs
from runtime.model.triton.keys import Memory
from runtime.model.triton.layers import hidden_states, waits
from runtime.model.triton.sampling import candidates, next_tokens, way_of
from runtime.sampling.candidates import Candidates
from runtime.sampling.params import Sampling

# Blocks of positions for which a rotary table is made at once: its address must not change under a graph.
_LEAST_TABLE = 32


class TritonDecoder(BaseDecoder):
    """A `Decoder` whose rows have the same bits at every width; on a CPU by Triton's interpreter."""

    def __init__(
        self, architecture: Architecture, config: Any, parts: Parts, kernel: Kernel, kv: CacheScheme = UNCALIBRATED
    ):
        """See BaseDecoder."""
        super().__init__(architecture, config, parts, kernel, kv)
        self._angles: dict[int, Turns] = {}
        self._logits: Tensor | None = None
        # What the last forward returned, and its largest entries, which were looked for on the way.
        self._returned: tuple[Tensor, Tensor] | None = None
        self._graphs, self._staging = Graphs(self.device), Staging(self.device)
        self._cut: dict[Bucket, Inputs] = {}

    def new_cache(
        self, kind: CacheKind = "float32", pages: int | None = None, states: StateKind = "float32"
    ) -> GpuCache:
        """See BaseDecoder; without `pages` a pool of as many as the requests may come to need.

        Raises UserError for states in int8.
        """
        if states == "int8":
            raise UserError("states in int8 are for CPUs; on a GPU take float16, or leave it out")
        return GpuCache(self._cache_format(kind, states), pages)

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder; what it returns lies on the device. Raises as slots.checked_cache and slots.reserve."""
        return self.forward_drafted(tokens, rows, cache, logits_at, None, ())

    @torch.inference_mode()
    def forward_drafted(
        self,
        tokens: Tensor,
        rows: Rows,
        cache: Cache,
        logits_at: Tensor | None,
        drafted: Tensor | None,
        places: Sequence[int],
    ) -> Out:
        """See on_device.DeviceRounds. Raises as `forward`."""
        held = self._checked(tokens, rows, cache, logits_at)
        if len(rows) == 0:
            empty = torch.empty((0, self.vocab_size), device=self.device)
            taken = empty.new_empty((0, len(self.taps) * self.hidden_size)) if self.taps else None
            return Out(empty, empty.new_empty((0, self.hidden_size)), taken)
        self._recall_states(rows, held)
        reserved, words = reserve(rows, held), tokens.numpy().astype("int32")
        extend_states(reserved, tokens, held, logits_at)
        with self._here():
            found = self._compute(reserved, len(rows), held, words, drafted, places, logits_at)
        if drafted is not None:
            learn_rows(reserved, drafted, places, held)
        self._returned = found.logits, found.largest
        return Out(found.logits, found.hidden, found.taken if self.taps else None)

    @torch.inference_mode()
    def draft(
        self,
        tokens: Tensor,
        rows: Rows,
        cache: Cache,
        steps: Sequence[int],
        limit: int,
        samplings: Sequence[Sampling] | None = None,
    ) -> Tensor:
        """See on_device.DeviceRounds. Raises as `continue_greedy`, but for tokens that are no numbers;
        ValueError for samplings that are not `plain`, or not one for each request."""
        held = self._checked(tokens, rows, cache, None)
        if samplings is not None and (len(samplings) != len(steps) or not all(way.plain for way in samplings)):
            raise ValueError(f"{len(steps)} requests need as many samplings, all of which must be plain")
        self._recall_states(rows, held)
        reserved = reserve_drafts(rows, held, steps, limit, self.vocab_size)
        if not reserved:
            return torch.empty((0, 0), dtype=torch.int64, device=self.device)
        extend_states(reserved, tokens, held, further=[count - 1 for count in steps])
        with self._here():
            words, ways = tokens.numpy().astype("int32"), samplings or [Sampling()] * len(reserved)
            chains = Chains(words, reserved, held, steps, ways, limit)
            alike = len({way_of(way) for way in ways}) == 1 and len(tokens) <= WIDEST
            drafted = self._drafted_at_once(chains) if alike else self._drafted(chains)
        learn_drafts(reserved, drafted, steps, held)
        return drafted

    def _drafted_at_once(self, chains: Chains) -> Tensor:
        """All steps as one run, for requests that are sampled alike and do not feed too much to be captured."""
        shape, held = round_for(chains), chains.cache
        fill_round(shape, self._staging.take(shape.words), chains)
        block = self._graphs.block(shape)
        self._staging.send(block)
        inputs = steps_of(shape, block)

        def forward(inputs: Inputs, sharing: int, at: Tensor | None) -> Tensor:
            return self._hidden(held, shape.first.blocks, inputs, sharing, at)[0]

        def body() -> Tensor:
            return draft_round(shape, inputs, forward, partial(self._logits_of, captured=True))

        out = (
            body()
            if waits(self.parts, shape.first.rows, self.architecture)
            else self._graphs.run(held.memory, shape, body)
        )
        # A graph's memory is good until the next run.
        return out[:, : len(chains.reserved)].t().clone()

    def _drafted(self, chains: Chains) -> Tensor:
        """Step by step."""
        words, reserved, held, steps, ways, limit = chains
        lasts = torch.tensor([r.first + r.count - 1 for r in reserved])
        texts = [r.start + r.count for r in reserved]  # tokens before the next one
        out = torch.empty((max(steps), len(reserved)), dtype=torch.int64, device=self.device)
        chosen = out[0]
        for step in range(max(steps)):
            if step:
                going = [
                    Reserved(r.request, i, 1, text + step - 1, None)
                    for i, (r, text) in enumerate(zip(reserved, texts, strict=True))
                    if step < steps[i]
                ]
                found = self._compute(going, len(reserved), held, words[:0], chosen, range(len(reserved)), None)
            else:
                found = self._compute(reserved, len(words), held, words, None, (), lasts)
            asked = [RowSampling(way, text + step) for way, text in zip(ways, texts, strict=True)]
            chosen = out[step]
            # The graph's argmax where that is all that is asked for.
            plain = limit == self.vocab_size and all(one.sampling.greedy for one in asked)
            chosen.copy_(found.largest if plain else next_tokens(found.logits, asked, limit))
        return out.t()

    def continue_greedy(self, tokens: Tensor, rows: Rows, cache: Cache, steps: Sequence[int], limit: int) -> Tensor:
        """See contract.GreedyChains; waits for the device once. The tokens are those that `forward` would lead to."""
        drafted = self.draft(tokens, rows, cache, steps, limit).cpu()
        counts = torch.tensor(steps, dtype=torch.int64).unsqueeze(1)
        real = torch.arange(drafted.shape[1]) < counts
        if bool((real & (drafted == NON_FINITE)).any()):
            raise FloatingPointError("a row of logits holds NaN or Inf")
        return torch.where(real, drafted, -1)

    @torch.inference_mode()
    def next_tokens(
        self, logits: Tensor, asked: Sequence[RowSampling], drafted: Tensor | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """See on_device.DeviceRounds. Raises ValueError as sampling.next_tokens."""
        with self._here():
            known = self._largest(logits, asked)
            found = next_tokens(logits, asked) if known is None else known
        if drafted is None:
            return found.tolist(), []
        both = torch.cat((found, drafted.flatten())).tolist()
        rest, wide = both[len(asked) :], drafted.shape[1]
        return both[: len(asked)], [rest[i : i + wide] for i in range(0, len(rest), wide)]

    def _largest(self, logits: Tensor, asked: Sequence[RowSampling]) -> Tensor | None:
        """What `next_tokens` finds for all rows of the last forward where all are greedy; else None."""
        if self._returned is None or logits is not self._returned[0] or len(asked) != len(logits):
            return None
        greedy = all(one.sampling.greedy and one.sampling.plain for one in asked)
        return self._returned[1] if greedy else None

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, asked: Sequence[RowSampling], count: int, limit: int
    ) -> list[Candidates | None]:
        with self._here():
            return candidates(logits, asked, count, limit)

    def mark(self) -> object:
        """See on_device.DeviceRounds; without CUDA the host's time."""
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, first: object, second: object) -> float:
        if isinstance(first, float) and isinstance(second, float):
            return second - first
        return first.elapsed_time(second) / 1000  # type: ignore[attr-defined]

    def _here(self) -> AbstractContextManager[object]:
        """Triton launches on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _checked(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None) -> GpuCache:
        held = checked_cache(tokens, rows, cache, logits_at, self.architecture)
        if not isinstance(held, GpuCache):
            raise TypeError(f"this decoder needs the cache of its new_cache(), not {type(cache).__name__}")
        return held

    @torch.inference_mode()
    def _run_again(self, tokens: Tensor, chain: Reserved, cache: KeyValueCache) -> None:
        assert isinstance(cache, GpuCache)
        words, last = tokens.numpy().astype("int32"), torch.tensor([chain.count - 1])
        with self._here():
            self._compute([chain], chain.count, cache, words, None, (), last)

    def _compute(
        self,
        reserved: Sequence[Reserved],
        count: int,
        cache: GpuCache,
        tokens: Words,
        drafted: Tensor | None,
        places: Sequence[int],
        at: Tensor | None,
    ) -> Computed:
        """One forward of `count` rows, of which `places` have the tokens `drafted` on the device; rows `at` of it."""
        keys, states = max(r.start + r.count for r in reserved), cache.format.states
        bucket = bucket_for(count, len(reserved), keys, depth_of(reserved), states)
        fill(bucket, self._staging.take(bucket.words), tokens, reserved, cache)
        block = self._graphs.block(bucket)
        self._staging.send(block)
        inputs = self._inputs_of(bucket, block)
        if drafted is not None:
            # What is no token is found when the drafts are looked at; until then it must not be looked up.
            values = drafted.clamp(min=0).to(torch.int32)
            if list(places) == [*range(len(places))]:
                inputs.token[: len(places)].copy_(values)
            else:
                inputs.token.index_copy_(0, torch.tensor(places).to(self.device, non_blocking=True), values)
        # All rows' logits cost no more than some where few rows are: the head is read once.
        early = None if at is None or bucket.captured else at.to(self.device, non_blocking=True)

        def body() -> Computed:
            hidden, taken = self._hidden(cache, bucket.blocks, inputs, bucket.sharing, early, self.taps)
            logits = self._logits_of(hidden, bucket.captured)
            return Computed(logits, hidden, next_tokens(logits, [ARGMAX] * len(logits)), taken)

        found = (
            body()
            if waits(self.parts, bucket.rows, self.architecture)
            else self._graphs.run(cache.memory, bucket, body)
        )
        if early is not None:
            return found._replace(taken=found.taken[:count])
        # A graph's memory is good until the next run.
        taken = found.taken[:count].clone() if self.taps else found.taken
        if at is None:
            logits, hidden, largest = (part[:count].clone() for part in found[:3])
            return Computed(logits, hidden, largest, taken)
        rows = at.to(self.device, non_blocking=True)
        logits, hidden, largest = (part[rows] for part in found[:3])
        return Computed(logits, hidden, largest, taken)

    def _inputs_of(self, bucket: Bucket, block: Tensor) -> Inputs:
        """The parts of a block; of one that graphs read they are cut once."""
        if not bucket.captured:
            return Inputs(**bucket.cut(block), halves=bucket.halves)
        if bucket not in self._cut:
            self._cut[bucket] = Inputs(**bucket.cut(block), halves=bucket.halves)
        return self._cut[bucket]

    def _hidden(
        self,
        cache: GpuCache,
        blocks: int,
        inputs: Inputs,
        sharing: int,
        at: Tensor | None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        factors = tuple(form.key_factor for form in cache.formats)
        bases = tuple(form.basis for form in cache.formats)
        memory = Memory(cache.memories, cache.format.kind, factors, bases, blocks * KEY_BLOCK, sharing)
        # Always the same tensors for so many blocks: graphs hold their addresses.
        blocks = max(blocks, _LEAST_TABLE)
        if blocks not in self._angles:
            last = blocks * KEY_BLOCK
            tables, growth = self._rotary.upto(last - 1), self._rotary.growth(last - 1)
            angles = tuple((cos[:last], sin[:last]) for cos, sin in tables)
            self._angles[blocks] = Turns(angles, None if growth is None else growth[:last])
        return hidden_states(self.parts, self.architecture, inputs, memory, self._angles[blocks], at, taps)

    def _logits_of(self, hidden: Tensor, captured: bool) -> Tensor:
        """The head's output; of forwards that are captured in one place, so that graphs do not each keep their own."""
        head, a = self.parts.head, self.architecture
        if captured and isinstance(head, TritonLinear):
            if self._logits is None:
                self._logits = torch.empty((WIDEST, self.vocab_size), device=self.device)
            logits = head.product(head.round(hidden), out=self._logits[: len(hidden)])
        else:
            logits = head(hidden)
        if a.logits_scale != 1.0:
            logits = logits.mul_(a.logits_scale)
        return logits.copy_(capped(logits, a.final_softcap)) if a.final_softcap else logits
