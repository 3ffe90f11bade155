"""Continuous batching: requests share forwards, and join and leave at any round.

A round drafts for every request that is decoding, and runs one forward of the target over all drafts and over pieces of
the prompts that are still to be read. The target's cache holds all of a request's tokens but the last, which is fed
together with its next draft. One request is a batch of one: the same loop serves it.
"""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from runtime.contract import Cache, Decoder
from runtime.engine.deferred import begin_deferred, require_finite
from runtime.engine.metrics import Clock, Metrics
from runtime.engine.round import EMPTY, Live, Work, account, along, asked_of, handle_of, judge, learn, rows_of
from runtime.errors import UserError
from runtime.model.on_device import DeviceRounds, RowSampling
from runtime.sampling.distribution import Logits, argmax_tokens, host
from runtime.sampling.stopping import kept
from runtime.speculative.draft import Draft, Drafter, Outcome, Request
from runtime.speculative.draft_length import LONGEST, Controller
from runtime.speculative.verify import Rule, require_sound

# Rows of prompts in one forward: all of them where nobody waits for a next token, fewer where others do.
PREFILL_ROWS = 512
MIXED_ROWS = 128


class Engine:
    """Runs requests to their ends, as many at once as the cache and `max_batch` allow.

    decoder, cache  the target, and a cache of its making; engines may share both.
    draft_length    γ: the most tokens drafted a round; or a Controller, which chooses it round by round.
    rule            judges the drafts of requests that sample.
    max_batch       requests in one forward; the others wait in the order in which they came.

    Where the cache runs out of pages the youngest request gives its own back and waits; it goes on later where it was.
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
        # Asked once: to compare a decoder with a protocol takes as long as a twentieth of a small model's forward.
        self._device_rounds = decoder if isinstance(decoder, DeviceRounds) else None
        self._max_batch = max_batch
        self.clock = Clock() if clock is None else clock
        self._live: list[Live] = []
        self._waiting: deque[Live] = deque()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live or self._waiting)

    def add(self, request: Request, metrics: Metrics, came: float | None = None) -> None:
        """Takes a request on; the next `step` may begin it. `came`: when its times begin to count (None: now).

        Raises UserError where the cache can never hold it.
        """
        one = Live(request, self._count, metrics, self.clock.now() if came is None else came)
        handle = self._cache.open(one.capacity)  # refuses what is too large, here and not in the middle of a batch
        self._cache.close(handle)
        metrics.requests, metrics.prompt_tokens, metrics.arrivals = 1, request.prompt_length, [[]]
        self._count += 1
        self._waiting.append(one)

    def cancel(self, request: Request) -> None:
        """Ends a request where it is; the others go on as if it had never been there."""
        for one in [*self._live, *self._waiting]:
            if one.request is request:
                self._drop(one)

    def close(self) -> None:
        """Cancels everything."""
        for one in [*self._live, *self._waiting]:
            self._drop(one)

    def step(self) -> list[Request]:
        """One round. Returns the requests that gained tokens in it; those that ended have left."""
        started = self.clock.now()
        self._admit()
        work = self._plan()
        if not work:
            return []
        drafting = [part for part in work if part.budget > 0]
        later = None if self._device_rounds is None else begin_deferred(self._device_rounds, self._drafter, work)
        drafts = self._propose(drafting) if later is None else later.unknown
        drafted = self.clock.now()
        tokens, rows, at = rows_of(work, drafts)
        judged = [part for part in work if part.judged]
        lengths = [len(part.one.request.tokens) for part in judged]
        try:
            if later is None:
                out = self._decoder.forward(tokens, rows, self._cache, at)
                choices = self._choices(judged, drafts, out.logits)
            else:
                out = later.forward(tokens, rows, self._cache, at)
                choices, drafts = later.settle(self._asked(judged, drafts), out.logits)
                drafted = started + later.seconds
            outcomes = self._settle(judged, drafts, host(out.logits), choices, out.hidden)
        except BaseException:
            # Slots that the forward took and may not have written: nobody must come to read or to adopt them.
            for part in work:
                self._cache.truncate(handle_of(part.one), part.first)
            raise
        for part, length in zip(judged, lengths, strict=True):
            if not part.decoding:
                # The prompt is complete: others that begin like it need not read it again.
                self._cache.publish(handle_of(part.one), part.one.request.tokens[:length])
        verified = self.clock.now()
        self._drafter.observe(outcomes)
        counted = account(work, drafts, outcomes, lengths, (started, drafted, verified, self.clock.now()), len(tokens))
        if self._controller is not None and counted.decoding == len(work):
            learn(self._controller, work, counted)
        for part in work:
            part.one.drafted = part.budget > 0
        for part in judged:
            if part.one.request.finished:
                self._drop(part.one)
        return [part.one.request for part in judged]

    def _admit(self) -> None:
        """Begins waiting requests, in their order, while there is room."""
        while self._waiting and len(self._live) < self._max_batch:
            one = self._waiting[0]
            tokens = one.request.tokens
            handle = self._cache.open(one.capacity)
            known = self._cache.adopt(handle, tokens)
            if self._live and self._cache.shortage({handle: len(tokens) - known}):
                self._cache.close(handle)
                return
            one.handle = handle
            one.metrics.reused_tokens += known
            self._live.append(self._waiting.popleft())

    def _plan(self) -> list[Work]:
        """What goes into the next forward; requests that the cache has no room for are put back."""
        while self._live:
            work = self._wanted()
            if self._fits(work):
                return work
            work = [part._replace(budget=0) for part in work]
            if self._fits(work):
                return work
            if len(self._live) == 1:
                raise UserError(
                    "the cache ran out of pages with one request left in it: other requests hold the rest; give it more"
                )
            self._put_back(max(self._live, key=lambda one: one.number))
        return []

    def _fits(self, work: Sequence[Work]) -> bool:
        return not self._cache.shortage({handle_of(part.one): part.fed + part.budget for part in work})

    def _wanted(self) -> list[Work]:
        """The decoding requests with their drafts, and pieces of the prompts as far as the rows go."""
        held = [self._cache.length(handle_of(one)) for one in self._live]
        decoding = [
            one.metrics.arrivals[0] != [] and len(one.request.tokens) == first + 1
            for one, first in zip(self._live, held, strict=True)
        ]
        ready_ones = [one for one, ready in zip(self._live, decoding, strict=True) if ready]
        budgets = self._budgets(ready_ones, alone=len(ready_ones) == len(self._live))
        room = MIXED_ROWS if any(decoding) else PREFILL_ROWS
        work = []
        for one, first, ready in zip(self._live, held, decoding, strict=True):
            count = len(one.request.tokens) - first
            if ready:
                work.append(Work(one, first, 1, budgets[one.number], True, True))
            elif room > 0:
                piece = min(count, room)
                room -= piece
                work.append(Work(one, first, piece, 0, piece == count, False))
        return work

    def _budgets(self, decoding: Sequence[Live], alone: bool) -> dict[int, int]:
        """By number, how many tokens may be drafted for each. `alone`: no prompt shares the forward."""
        controller = self._controller
        if self._draft_length == 0 or (controller is not None and controller.resting(len(decoding))):
            return {one.number: 0 for one in decoding}
        # A round adds the target's own token as well, so the last token of a text needs no draft.
        room = {one.number: max(0, one.request.missing - 1) for one in decoding}
        if not decoding:
            return room
        if controller is None:
            return {number: min(self._draft_length, most) for number, most in room.items()}
        gamma, count = controller.next_budget(len(decoding), max(room.values()), alone)
        if gamma == 0:
            return dict.fromkeys(room, 0)
        if count >= len(decoding):
            return {number: min(gamma, most) for number, most in room.items()}
        # Rather one whose drafter is up to date, and that has room for the whole draft.
        first = sorted(decoding, key=lambda one: (not one.drafted, -min(gamma, room[one.number])))[:count]
        chosen = {one.number for one in first}
        return {number: min(gamma, most) if number in chosen else 0 for number, most in room.items()}

    def _put_back(self, one: Live) -> None:
        """Preempts: the pages go, tokens and noise stay; the text goes on from its last token when there is room."""
        handle = handle_of(one)
        self._cache.publish(handle, one.request.tokens[: self._cache.length(handle)])
        self._release(one)
        one.metrics.preemptions += 1
        self._waiting.appendleft(one)

    def _propose(self, drafting: Sequence[Work]) -> dict[int, Draft]:
        """By the request's number."""
        if not drafting:
            return {}
        drafts = self._drafter.propose([part.one.request for part in drafting], [part.budget for part in drafting])
        for draft, part in zip(drafts, drafting, strict=True):
            require_sound(draft, part.budget, self._decoder.vocab_size)
        return {part.one.number: draft for part, draft in zip(drafting, drafts, strict=True)}

    def _asked(self, judged: Sequence[Work], drafts: dict[int, Draft]) -> list[RowSampling]:
        """What the device is to choose by at each row of logits."""
        parts = [asked_of(part.one.request, drafts.get(part.one.number, EMPTY), self._rule) for part in judged]
        return [one for asked in parts for one in asked]

    def _choices(self, judged: Sequence[Work], drafts: dict[int, Draft], logits: Tensor) -> list[int]:
        """At each row the token that the device chooses where it can, else the argmax."""
        if self._device_rounds is not None:
            return require_finite(self._device_rounds.next_tokens(logits, self._asked(judged, drafts))[0])
        return argmax_tokens(host(logits), "target")

    def _settle(
        self,
        judged: Sequence[Work],
        drafts: dict[int, Draft],
        logits: Logits,
        choices: list[int],
        hidden: Tensor,
    ) -> list[Outcome]:
        """Judges each draft, appends what was accepted, and rolls the cache back to it."""
        there = self._device_rounds is not None
        outcomes, base = [], 0
        for part in judged:
            one = part.one
            draft = drafts.get(one.number, EMPTY)
            end = base + len(draft.tokens) + 1
            verdict = judge(one.request, draft, logits[base:end], choices[base:end], self._rule, there)
            request, before = one.request, len(one.request.tokens)
            gained = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            count, stopped = kept(gained, request.stop_tokens, request.stop_strings)
            gained = gained[:count]
            path = verdict.path[: len(gained)]
            request.tokens += gained
            request.noise.forget(len(request.tokens))
            request.finished = stopped or request.missing <= 0
            self._roll_back(handle_of(one), before, path, len(draft.tokens))
            outcomes.append(Outcome(request, path, len(path), along(hidden[base:end], path)))
            if request.finished:
                one.metrics.kv_bytes = len(request.tokens) * self._cache.bytes_per_token()
            one.metrics.arrivals[0] += [self.clock.now() - one.started] * len(gained)
            base = end
        return outcomes

    def _roll_back(self, handle: int, before: int, path: list[int], drafted: int) -> None:
        """Leaves in the cache the `before` tokens of the text so far and the accepted path."""
        if path != list(range(len(path))):
            self._cache.keep(handle, before, path)
        elif len(path) < drafted:
            self._cache.truncate(handle, before + len(path))

    def _release(self, one: Live) -> None:
        """Frees what a running request holds. Out of the list first: an interrupt must not free a handle twice."""
        self._live.remove(one)
        handle, one.handle = handle_of(one), None
        self._cache.close(handle)
        self._drafter.close(one.request)

    def _drop(self, one: Live) -> None:
        if one.handle is None:
            self._waiting.remove(one)
        else:
            self._cache.publish(one.handle, one.request.tokens[: self._cache.length(one.handle)])
            self._release(one)
        one.request.noise.forget()
