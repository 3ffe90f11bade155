"""The drafts of a round as one run: what each step reads, staged in one copy, and the steps one after the other.

All but the tokens is known beforehand: where each request's next token stands, where its key goes, and the noise that
chooses it. So each step takes the tokens of the step before from the device, and the whole is captured as one graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.cache.slots import Reserved
from runtime.model.triton.batch import ALIGNMENT, Bucket, Inputs, Shape, Words, bucket_for, fill, fill_up
from runtime.model.triton.cache import GpuCache
from runtime.model.triton.sampling import Way, key_of, sample_alike, way_of
from runtime.model.triton.states import places_of
from runtime.sampling.params import Sampling

# Hidden states of a forward's rows, or of some: (inputs, adjacent rows of one request, rows on the device).
Forward = Callable[[Inputs, int, Tensor | None], Tensor]


@dataclass(frozen=True)
class Round(Shape):
    """The shape of a round: whatever a graph of it holds but addresses.

    first    the bucket of the first step, which feeds each request's missing tokens. All steps see its table.
    rows     of the later steps, one for each request and those that fill up.
    steps    of the request that drafts most. The others' rows see nothing when theirs are over.
    limit    only tokens below it are drafted.
    way      how all tokens are sampled; None: greedy.
    """

    first: Bucket
    rows: int
    steps: int
    limit: int
    way: Way | None

    @property
    def captured(self) -> bool:
        return self.first.captured

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The first step's block, and parts of which each row is aligned."""
        lane = -(-self.rows // ALIGNMENT) * ALIGNMENT
        return {
            "first": (self.first.words,),
            **dict.fromkeys(("last", "request"), (lane,)),
            **dict.fromkeys(("position", "slot", "start"), (self.steps - 1, lane)),
            # Two of 64 bits: a row's seed and its token's position.
            "keys": (0 if self.way is None else self.steps, lane, 4),
            # Of layers that carry a state: each row is a request's only one.
            "span": (lane if self.first.states else 0, 2),
            "address": (self.steps - 1 if self.first.states else 0, lane, 4),
        }


@dataclass(frozen=True, eq=False)
class Steps:
    """The block of a round on the device.

    first    the first step's inputs; last  (rows,) int32: each request's last row of it.
    request  (rows,) int32; position, slot, start  (steps − 1, lane) int32 of the later steps: as Inputs has them.
    keys     (steps, lane, 2) int64, which sampling.sample_alike takes; none where the round is greedy.
    span     (lane, 2), and address (steps − 1, lane, 4), int32 of the later steps: as Inputs has them.
    """

    first: Inputs
    last: Tensor
    request: Tensor
    position: Tensor
    slot: Tensor
    start: Tensor
    keys: Tensor
    span: Tensor
    address: Tensor

    def later(self, step: int, token: Tensor) -> Inputs:
        """The inputs of step 1 or a later one, whose tokens are (rows,) int32."""
        rows, at = len(self.request), step - 1
        position, slot, start = (part[at, :rows] for part in (self.position, self.slot, self.start))
        address = self.address[at, :rows] if len(self.address) else self.address
        tail = self.request.new_empty((rows, 0))
        return Inputs(
            token, position, slot, self.request, start, tail, self.first.table, self.span[:rows], address,
            self.first.halves,
        )  # fmt: skip


class Chains(NamedTuple):
    """Drafts that are asked for: the first step's tokens (T,) and where they stand, then of each request the number of
    steps, 1 or more, and its sampling; only tokens below `limit` are drafted."""

    tokens: Words
    reserved: Sequence[Reserved]
    cache: GpuCache
    steps: Sequence[int]
    samplings: Sequence[Sampling]
    limit: int


def round_for(chains: Chains) -> Round:
    """The round of chains that are all sampled alike."""
    reserved, steps = chains.reserved, chains.steps
    rows, requests = sum(r.count for r in reserved), len(reserved)
    keys = max(r.start + r.count + count - 1 for r, count in zip(reserved, steps, strict=True))
    later, states = bucket_for(requests, requests, keys, 0).rows, chains.cache.format.states
    return Round(
        bucket_for(rows, requests, keys, 0, states), later, max(steps), chains.limit, way_of(chains.samplings[0])
    )


def fill_round(shape: Round, out: Words, chains: Chains) -> None:
    """Writes a round's inputs into `out` (shape.words,): the first step's tokens, and the slots that all steps got."""
    part, cache = shape.cut(out), chains.cache
    fill(shape.first, part.pop("first"), chains.tokens, chains.reserved, cache)
    fill_up(part, shape.first, cache)
    keys, addresses = part["keys"].view(np.int64), part["address"].view(np.int64)
    if shape.first.states:
        part["span"][: shape.rows] = [(row, 1) for row in range(shape.rows)]
    each = zip(chains.reserved, chains.steps, chains.samplings, strict=True)
    for i, (r, count, sampling) in enumerate(each):
        text = r.start + r.count  # tokens before the first that is drafted
        part["last"][i], part["request"][i] = r.first + r.count - 1, i
        part["position"][: count - 1, i] = np.arange(text, text + count - 1, dtype=np.int32)
        part["slot"][: count - 1, i] = cache.slots(r.request, text, count - 1)
        part["start"][: count - 1, i] = np.arange(text + 1, text + count, dtype=np.int32)
        if (states := cache.states(r.request)) is not None:
            taken = np.arange(text, text + count - 1)
            addresses[: count - 1, i] = np.stack((places_of(taken - 1, states), places_of(taken, states)), axis=1)
        if len(keys):
            keys[:, i] = key_of(sampling, text)
            keys[:, i, 1] += np.arange(shape.steps)


def steps_of(shape: Round, words: Tensor) -> Steps:
    """The parts of a block (shape.words,) int32."""
    part = shape.cut(words)
    first = Inputs(**shape.first.cut(part.pop("first")), halves=shape.first.halves)
    keys = part.pop("keys").view(torch.int64)
    last, request = (part.pop(name)[: shape.rows] for name in ("last", "request"))
    return Steps(first, last, request, **part, keys=keys)


def drafted(shape: Round, inputs: Steps, forward: Forward, head: Callable[[Tensor], Tensor]) -> Tensor:
    """The tokens (steps, rows) int64 of a round: on_device.DeviceRounds.draft's, and anything in rows beyond.

    Launches only, unless `forward` waits. head: the logits (rows, V) float32 of hidden states.
    """
    out = torch.empty((shape.steps, shape.rows), dtype=torch.int64, device=inputs.request.device)
    for step in range(shape.steps):
        if step:
            # What is no token is found when the drafts are looked at; until then it must not be looked up.
            hidden = forward(inputs.later(step, out[step - 1].clamp(min=0).to(torch.int32)), 1, None)
        else:
            hidden = forward(inputs.first, shape.first.sharing, inputs.last.long())
        keys = None if shape.way is None else inputs.keys[step, : shape.rows]
        out[step].copy_(sample_alike(head(hidden), shape.way, keys, shape.limit))
    return out
