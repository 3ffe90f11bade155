"""Continuous batching: requests share forwards, and join and leave at any round. A round is

    schedule    admit waiting requests; plan whose text goes on, with how long a draft, and which prompts are read
    draft       ask the drafter for a chain or tree after each text that goes on
    forward     run the target once over all drafts and pieces of prompts
    verify      accept of each draft what the target would have said, and add the target's own next token
    roll back   leave in the cache the accepted path alone
    learn       tell the drafter what became of its drafts, and the controller what the round took
    finish      let go of the requests that have ended

The target's cache holds all of a request's tokens but the last, which is fed together with its next draft. One request
is a batch of one: the same loop serves it.
"""

from collections import deque
from collections.abc import Sequence

from runtime.contract import Cache, Decoder, Out
from runtime.engine.deferred import DeferredRound, begin_deferred, require_finite
from runtime.engine.metrics import Clock, Metrics
from runtime.engine.round import (
    NO_DRAFT,
    RequestState,
    ScheduledRequest,
    account,
    aligned,
    append_accepted,
    forward_rows,
    learn,
    row_samplings,
    verify,
)
from runtime.errors import UserError
from runtime.model.on_device import DeviceRounds
from runtime.sampling.distribution import argmax_tokens, host
from runtime.speculative.draft import Draft, Drafter, Outcome, Request
from runtime.speculative.draft_length import LONGEST, Controller
from runtime.speculative.verify import Rule, require_sound

# Rows of prompts in one forward: all of them where nobody waits for a next token, fewer where others do.
PREFILL_ROWS = 512
MIXED_ROWS = 128


class Engine:
    """Runs requests to their ends, as many at once as the cache and `max_batch` allow.

    decoder, cache  the target, and a cache of its making; engines may share both.
    draft_length    γ: the most tokens drafted a round; or a Controller, which sets it round by round.
    rule            verifies the drafts of requests that sample.
    max_batch       requests in one forward; the others wait in the order in which they came.

    Where the cache runs out of pages the youngest request is preempted: it gives its pages back and waits; later it
    goes on where it was.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter,
        draft_length: int | Controller,
        rule: Rule,
        cache: Cache,
        clock: Clock | None = None,
        max_batch: int = 256,
    ) -> None:
        self._decoder, self._drafter, self._rule, self._cache = decoder, drafter, rule, cache
        self._controller = draft_length if isinstance(draft_length, Controller) else None
        self._draft_length = draft_length if isinstance(draft_length, int) else LONGEST
        # Looked up once: to compare a decoder with a protocol takes as long as a twentieth of a small model's forward.
        self._on_device = decoder if isinstance(decoder, DeviceRounds) else None
        self._max_batch = max_batch
        self.clock = Clock() if clock is None else clock
        self._running: list[RequestState] = []
        self._waiting: deque[RequestState] = deque()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._running or self._waiting)

    def add(self, request: Request, metrics: Metrics, came: float | None = None) -> None:
        """Takes a request on; the next `step` may begin it. `came`: when its times begin to count (None: now).

        Raises UserError where the cache can never hold it.
        """
        state = RequestState(request, self._count, metrics, self.clock.now() if came is None else came)
        handle = self._cache.open(state.capacity)  # refuses what is too large, here and not in the middle of a batch
        self._cache.close(handle)
        metrics.requests, metrics.prompt_tokens, metrics.arrivals = 1, request.prompt_length, [[]]
        self._count += 1
        self._waiting.append(state)

    def cancel(self, request: Request) -> None:
        """Ends a request where it is; the others go on as if it had never been there."""
        for state in [*self._running, *self._waiting]:
            if state.request is request:
                self._finish(state)

    def close(self) -> None:
        """Cancels everything."""
        for state in [*self._running, *self._waiting]:
            self._finish(state)

    def step(self) -> list[Request]:
        """One round. Returns the requests that gained tokens in it; those that ended have left."""
        started = self.clock.now()
        self._admit()
        batch = self._schedule()
        if not batch:
            return []
        drafts, deferred = self._draft(batch)
        drafted = self.clock.now()
        try:
            out, tokens, drafts = self._forward(batch, drafts, deferred)
            outcomes = self._verify(batch, drafts, tokens, out)
            self._roll_back(batch, drafts, outcomes)
        except BaseException:
            # Slots that the forward took and may not have written: nobody must come to read or to match them.
            for part in batch:
                self._cache.truncate(part.state.handle, part.first)
            raise
        if deferred is not None:
            drafted = started + deferred.seconds
        # Prompts that are complete now need not be read again by others that begin like them.
        for part in batch:
            if part.samples and not part.decoding:
                self._cache.cache_prefix(part.state.handle, part.state.request.tokens[: part.end])
        times = [started, drafted, self.clock.now()]
        self._drafter.observe([outcome for outcome in outcomes if outcome is not None])
        times.append(self.clock.now())
        account(batch, drafts, outcomes, times)
        if self._controller is not None and all(part.decoding for part in batch):
            learn(self._controller, batch, drafts, outcomes, times)
        for part in batch:
            part.state.drafted = part.budget > 0
            if part.state.request.finished:
                self._finish(part.state)
        return [part.state.request for part in batch if part.samples]

    def _admit(self) -> None:
        """Begins waiting requests, in their order, while there is room."""
        while self._waiting and len(self._running) < self._max_batch:
            state = self._waiting[0]
            tokens = state.request.tokens
            handle = self._cache.open(state.capacity)
            known = self._cache.match_prefix(handle, tokens)
            if self._running and self._cache.missing_pages({handle: len(tokens) - known}):
                self._cache.close(handle)
                return
            state.handle = handle
            state.metrics.reused_tokens += known
            self._running.append(self._waiting.popleft())

    def _schedule(self) -> list[ScheduledRequest]:
        """What goes into the next forward; requests that the cache has no room for are preempted."""
        while self._running:
            batch = self._wanted()
            if self._fits(batch):
                return batch
            batch = [part._replace(budget=0) for part in batch]
            if self._fits(batch):
                return batch
            if len(self._running) == 1:
                raise UserError(
                    "the cache ran out of pages with one request left in it: other requests hold the rest; give it more"
                )
            # Its pages go, tokens and noise stay; the text goes on from its last token when there is room.
            newest = max(self._running, key=lambda state: state.number)
            self._release(newest)
            newest.metrics.preemptions += 1
            self._waiting.appendleft(newest)
        return []

    def _fits(self, batch: Sequence[ScheduledRequest]) -> bool:
        return not self._cache.missing_pages({part.state.handle: part.fed + part.budget for part in batch})

    def _wanted(self) -> list[ScheduledRequest]:
        """The decoding requests with their drafts, and pieces of the prompts as far as the rows go."""
        held = [self._cache.length(state.handle) for state in self._running]
        decoding = [
            state.metrics.arrivals[0] != [] and len(state.request.tokens) == first + 1
            for state, first in zip(self._running, held, strict=True)
        ]
        budgets = self._budgets([state for state, ready in zip(self._running, decoding, strict=True) if ready])
        room = MIXED_ROWS if any(decoding) else PREFILL_ROWS
        batch = []
        for state, first, ready in zip(self._running, held, decoding, strict=True):
            count = len(state.request.tokens) - first
            if ready:
                batch.append(ScheduledRequest(state, first, 1, budgets[state.number], samples=True, decoding=True))
            elif room > 0:
                piece = min(count, room)
                room -= piece
                batch.append(ScheduledRequest(state, first, piece, 0, samples=piece == count, decoding=False))
        return batch

    def _budgets(self, decoding: Sequence[RequestState]) -> dict[int, int]:
        """By number, how many tokens may be drafted for each of the requests that are decoding."""
        controller = self._controller
        if self._draft_length == 0 or (controller is not None and controller.resting(len(decoding))):
            return {state.number: 0 for state in decoding}
        # A round adds the target's own token as well, so the last token of a text needs no draft.
        room = {state.number: max(0, state.request.missing - 1) for state in decoding}
        if not decoding:
            return room
        if controller is None:
            return {number: min(self._draft_length, most) for number, most in room.items()}
        alone = len(decoding) == len(self._running)  # no prompt shares the forward
        gamma, count = controller.next_budget(len(decoding), max(room.values()), alone)
        # Rather one whose drafter is up to date, and that has room for the whole draft.
        first = sorted(decoding, key=lambda state: (not state.drafted, -min(gamma, room[state.number])))[:count]
        drafting = {state.number for state in first}
        return {number: min(gamma, most) if number in drafting else 0 for number, most in room.items()}

    def _draft(self, batch: Sequence[ScheduledRequest]) -> tuple[list[Draft], DeferredRound | None]:
        """A draft for each part. Of a deferred round: placeholders, whose tokens are still on their way."""
        drafting = [part for part in batch if part.budget > 0]
        if not drafting:
            return [NO_DRAFT] * len(batch), None
        if self._on_device is not None:
            deferred = begin_deferred(self._on_device, self._drafter, batch)
            if deferred is not None:
                return deferred.placeholders, deferred
        found = self._drafter.propose([part.state.request for part in drafting], [part.budget for part in drafting])
        for draft, part in zip(found, drafting, strict=True):
            require_sound(draft, part.budget, self._decoder.vocab_size)
        return aligned(batch, found), None

    def _forward(
        self, batch: Sequence[ScheduledRequest], drafts: list[Draft], deferred: DeferredRound | None
    ) -> tuple[Out, list[int], list[Draft]]:
        """The target's output, its token at each row of logits (the device's sample or the argmax), and the drafts.

        Raises UserError where logits of either model are not finite.
        """
        tokens, rows, logits_at = forward_rows(batch, drafts)
        if deferred is not None:
            out = deferred.forward(tokens, rows, self._cache, logits_at)
            return out, *deferred.settle(row_samplings(batch, drafts, self._rule), out.logits)
        out = self._decoder.forward(tokens, rows, self._cache, logits_at)
        if self._on_device is None:
            return out, argmax_tokens(host(out.logits), "target"), drafts
        found, _ = self._on_device.next_tokens(out.logits, row_samplings(batch, drafts, self._rule))
        return out, require_finite(found), drafts

    def _verify(
        self, batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], tokens: Sequence[int], out: Out
    ) -> list[Outcome | None]:
        """Verifies each draft and appends what was accepted; None for a part that gains no token.

        tokens  the target's token at each row of logits.
        """
        outcomes: list[Outcome | None] = []
        logits, base = host(out.logits), 0
        for part, draft in zip(batch, drafts, strict=True):
            if not part.samples:
                outcomes.append(None)
                continue
            state = part.state
            rows = slice(base, base + len(draft.tokens) + 1)
            accepted = verify(state.request, draft, logits[rows], tokens[rows], self._rule, self._on_device is not None)
            outcomes.append(append_accepted(state.request, draft, accepted, out.hidden[rows]))
            if state.request.finished:
                state.metrics.kv_bytes = len(state.request.tokens) * self._cache.bytes_per_token()
            gained = len(state.request.tokens) - part.end
            state.metrics.arrivals[0] += [self.clock.now() - state.started] * gained
            base = rows.stop
        return outcomes

    def _roll_back(
        self, batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], outcomes: Sequence[Outcome | None]
    ) -> None:
        """Leaves in the cache the text before the drafts and the accepted paths."""
        for part, draft, outcome in zip(batch, drafts, outcomes, strict=True):
            if outcome is None:
                continue
            if outcome.path != list(range(outcome.length)):
                self._cache.keep(part.state.handle, part.end, outcome.path)
            elif outcome.length < len(draft.tokens):
                self._cache.truncate(part.state.handle, part.end + outcome.length)

    def _release(self, state: RequestState) -> None:
        """Frees what a running request holds; its prefix stays for others to match."""
        handle = state.handle
        self._cache.cache_prefix(handle, state.request.tokens[: self._cache.length(handle)])
        # Out of the list first: an interrupt must not free a handle twice.
        self._running.remove(state)
        state.handle = -1
        self._cache.close(handle)
        self._drafter.close(state.request)

    def _finish(self, state: RequestState) -> None:
        if state.handle < 0:
            self._waiting.remove(state)
        else:
            self._release(state)
        state.request.noise.forget()
