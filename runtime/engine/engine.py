"""Continuous batching: requests share forwards, and join and leave at any round. A round is

    schedule    admit waiting requests; plan whose text goes on, with how long a draft, and which prompts are read
    draft       ask the drafters for a chain or tree after each text that goes on
    forward     run the target once over all drafts and pieces of prompts
    verify      accept of each draft what the target would have said, and add the target's own next token
    roll back   leave in the cache the accepted path alone
    learn       tell the drafters what became of their drafts, and their controllers what the round took
    finish      let go of the requests that have ended

The target's cache holds all of a request's tokens but the last, which is fed together with its next draft. One request
is a batch of one: the same loop serves it. What fails for one request ends that one alone.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from runtime.cache.apart import SharesNothing
from runtime.contract import Cache, Decoder, no_drafts
from runtime.engine.deferred import DeferredRound
from runtime.engine.drafting import Drafters
from runtime.engine.forward import Forwarded, ForwardError, Target, run_forward
from runtime.engine.learning import learn
from runtime.engine.logprobs import missing_prompt_rows, note_gained, note_prompt
from runtime.engine.metrics import Clock, Counts, Metrics
from runtime.engine.round import (
    NO_DRAFT,
    RequestState,
    ScheduledRequest,
    account,
    append_accepted,
    note_round,
    resting,
    roll_back,
    shares_of,
    verify,
)
from runtime.engine.schedule import no_budgets, plan_round
from runtime.engine.taken import with_taps
from runtime.errors import UserError
from runtime.speculative.draft import Draft, Drafter, Outcome, Request, Rule
from runtime.speculative.draft_length import Controller


class Engine:
    """Runs requests to their ends, as many at once as the cache and `max_batch` allow.

    decoder, cache  the target, and a cache of its making; engines may share both.
    drafter         the requests' drafter, or several by name (drafting.Drafters).
    draft_length    γ: the most tokens drafted a round; or a Controller, which sets it round by round; or one for each
                    drafter by name.
    rule            verifies the drafts of requests that sample, where they say nothing else.
    max_batch       requests in one forward; the others wait in the order in which they came.
    lenient         a drafter that fails is left alone by the requests it failed for, which go on without drafts;
                    otherwise `step` raises what it raised.

    Where the cache runs out of pages the youngest request is preempted: it gives its pages back and waits; later it
    goes on where it was.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter | Mapping[str, Drafter],
        draft_length: int | Controller | Mapping[str, Controller],
        rule: Rule,
        cache: Cache,
        clock: Clock | None = None,
        max_batch: int = 256,
        lenient: bool = False,
    ) -> None:
        self._rule, self._cache, self._paged = rule, cache, not isinstance(cache, SharesNothing)
        # Whoever drafts: nothing is asked for where it could not be taken back.
        self._drafters = Drafters(drafter, 0 if no_drafts(decoder) else draft_length, lenient)
        plain, tapped = with_taps(decoder, self._drafters.readers.taps)
        self._target, self._tapped = Target.of(plain, cache), Target.of(tapped, cache)
        self._on_device, self._vocab_size = self._tapped.on_device, decoder.vocab_size
        self._max_batch = max_batch
        self.clock = Clock() if clock is None else clock
        self._running: list[RequestState] = []
        self._waiting: deque[RequestState] = deque()
        self._apart: list[RequestState] = []  # of a forward that failed: each is run alone, to find whose fault it was
        self._failed: list[Request] = []
        self._count = 0
        self._after = 0.0  # seconds of the last round after its times; closing an ended text is of no round

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._running or self._waiting)

    def counts(self) -> Counts:
        """What is going on now."""
        pages, free = self._cache.pages, self._cache.pages_free
        return Counts(len(self._running), len(self._waiting), pages - free, free)

    def add(self, request: Request, metrics: Metrics, came: float | None = None) -> None:
        """Takes a request on; the next `step` may begin it. `came`: when its times begin to count (None: now).

        One that has ended already, as tokens that were there from the start may have it, is left as it is.
        Raises UserError where the cache can never hold it, or its drafter is unknown.
        """
        metrics.requests, metrics.prompt_tokens, metrics.arrivals = 1, request.prompt_length, [[]]
        if request.finished:
            return
        started = self.clock.now() if came is None else came
        state = RequestState(request, self._count, metrics, started, self._drafters.named(request.drafter))
        handle = self._cache.open(state.capacity)  # refuses what is too large, here and not in the middle of a batch
        self._cache.close(handle)
        if request.wanted.prompt_logprobs is not None and not request.found.prompt_logprobs:
            request.found.prompt_logprobs.append(None)
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
        """One round. Returns the requests that gained tokens in it or ended; those that ended have left.

        A request that fails has ended: its `error` says why. What the drafters raise is raised unless `lenient`.
        """
        started = self.clock.now()
        if self._waiting:
            self._admit()
        batch = self._schedule()
        if not batch:
            return self._take_failed()
        drafts, deferred, seconds = self._drafters.draft(batch, self._on_device, self._vocab_size, self.clock.now)
        drafted = self.clock.now()
        try:
            found, drafts = self._forward(batch, drafts, deferred)
            outcomes = self._verify(batch, drafts, found)
        except BaseException as error:
            # Slots that the forward took and may not have written: nobody must come to read or to match them.
            for part in batch:
                if part.state.handle >= 0:
                    self._cache.truncate(part.state.handle, part.first)
            if isinstance(error, ForwardError):
                self._find_fault(batch, error.cause)
                return self._take_failed()
            raise
        if deferred is not None:
            drafted = started + deferred.seconds
        verified = self.clock.now()
        if found.out.taken is not None:
            self._drafters.read(batch, drafts, outcomes, found.out.taken)
        rests = resting(batch)
        if rests is None:
            self._drafters.observe(batch, outcomes)
        times = (started, drafted, verified, self.clock.now())
        if rests is not None:
            rests.rested(times[-1] - started)
        elif self._drafters.learning:
            learn(batch, drafts, outcomes, times, seconds, self._after)
        changed, shares = [], shares_of(batch, drafts, times)
        for part, draft, outcome in zip(batch, drafts, outcomes, strict=True):
            account(part, draft, outcome, shares)
            if self._settle(part, draft, outcome, times):
                changed.append(part.state.request)
        self._after = self.clock.now() - times[-1] if batch[0].state.handle >= 0 else 0.0
        return changed + self._take_failed() if self._failed else changed

    def _settle(self, part: ScheduledRequest, draft: Draft, outcome: Outcome | None, times: Sequence[float]) -> bool:
        """What is left of a request's part of a round; whether it gained tokens or ended."""
        state, request = part.state, part.state.request
        if outcome is None or not part.decoding:
            self._settle_prompt(part, outcome)
        if outcome is not None:
            state.metrics.arrivals[0] += [times[2] - state.started] * (len(request.tokens) - part.end)
            if request.wanted.rounds:
                note_round(part, draft, outcome, times)
        state.drafted = part.budget > 0 and not state.forced
        if state.drafted:
            state.read = part.end
        ended = request.finished and request.error is None
        if ended:
            self._finish(state)
        return ended or outcome is not None

    def _settle_prompt(self, part: ScheduledRequest, outcome: Outcome | None) -> None:
        """After a round that read a piece of a prompt: complete ones need not be read again by others like them."""
        state, request = part.state, part.state.request
        if outcome is not None:
            self._cache.cache_prefix(state.handle, request.tokens[: part.end], request.cache_salt)
        elif part.end == len(request.tokens) and request.missing <= 0:
            request.finished = True  # nothing but its prompt was to be read

    def _admit(self) -> None:
        """Begins waiting requests, in their order, while there is room."""
        while self._waiting and len(self._running) < self._max_batch:
            state = self._waiting[0]
            request = state.request
            try:
                handle = self._cache.open(state.capacity)
            except Exception as error:
                self._fail(state, error)
                continue
            known = 0
            if not missing_prompt_rows(request):
                known = self._cache.match_prefix(handle, request.tokens, request.cache_salt)
            if self._running and self._cache.missing_pages({handle: len(request.tokens) - known}):
                self._cache.close(handle)
                return
            state.handle = handle
            state.metrics.reused_tokens += known
            if not state.admitted:
                state.admitted = True
                state.metrics.queue_seconds += max(0.0, self.clock.now() - state.started)
            self._running.append(self._waiting.popleft())

    def _schedule(self) -> list[ScheduledRequest]:
        """What goes into the next forward; requests that the cache has no room for are preempted."""
        while self._running:
            running, budgets = (self._apart[:1], no_budgets) if self._apart else (self._running, self._drafters.budgets)
            batch = plan_round(running, self._cache, self._vocab_size, budgets)
            if self._fits(batch):
                return batch
            batch = [part._replace(budget=0) for part in batch]
            if self._fits(batch):
                return batch
            # Its pages go, tokens and noise stay; the text goes on from its last token when there is room.
            newest = max(self._running, key=lambda state: state.number)
            if len(self._running) == 1:
                lacking = "the cache ran out of pages with one request left in it: other requests hold the rest"
                self._fail(newest, UserError(f"{lacking}; give it more"))
                self._admit()
                continue
            self._release(newest)
            newest.metrics.preemptions += 1
            self._waiting.appendleft(newest)
        return []

    def _fits(self, batch: Sequence[ScheduledRequest]) -> bool:
        if not self._paged:
            return True
        return not self._cache.missing_pages({part.state.handle: part.fed + part.budget for part in batch})

    def _forward(
        self, batch: Sequence[ScheduledRequest], drafts: list[Draft], deferred: DeferredRound | None
    ) -> tuple[Forwarded, list[Draft]]:
        """What the target gave, and the drafts, all of them known now."""
        target = self._tapped if self._drafters.reads(batch) else self._target
        found = run_forward(target, batch, drafts, deferred, self._rule)
        if deferred is not None:
            drafts = self._drafters.settle(deferred, found.drafts, self._vocab_size)
        return found, drafts

    def _verify(
        self, batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], found: Forwarded
    ) -> list[Outcome | None]:
        """Verifies each draft, appends what was accepted and rolls the cache back to it; None: a part gains nothing."""
        outcomes: list[Outcome | None] = []
        base = 0
        for part, draft in zip(batch, drafts, strict=True):
            outcome, first = None, base + len(part.scored)
            end = first + len(draft.tokens) + 1 if part.samples else first
            try:
                if part.scored:
                    note_prompt(part.state.request, part.scored, found.out.logits[base:first])
                if part.samples:
                    outcome = self._advance(part, draft, found, slice(first, end))
            except Exception as error:
                self._fail(part.state, error)
            if outcome is not None and draft.tokens:
                roll_back(self._cache, part, draft, outcome)
            outcomes.append(outcome)
            base = end
        return outcomes

    def _advance(self, part: ScheduledRequest, draft: Draft, found: Forwarded, at: slice) -> Outcome:
        """Verifies one draft and appends what was accepted; its n + 1 nodes are the rows `at` of logits and tokens."""
        state, request = part.state, part.state.request
        rule, on_device = request.rule or self._rule, self._on_device is not None
        logits, tokens = found.out.logits, found.tokens[at]
        try:
            accepted = verify(request, draft, logits, at, tokens, rule, on_device)
        except UserError:
            if not draft.tokens:
                raise
            # The text before what failed is to be what it would be without a draft.
            first = slice(at.start, at.start + 1)
            accepted = verify(request, NO_DRAFT, logits, first, tokens[:1], rule, on_device)
        outcome = append_accepted(request, draft, accepted, found.out.hidden, at.start)
        if request.wanted.logprobs is not None:
            note_gained(request, len(request.tokens) - part.end, outcome.path, logits[at])
        if request.finished:
            state.metrics.kv_bytes = len(request.tokens) * self._cache.bytes_per_token()
        return outcome

    def _find_fault(self, batch: Sequence[ScheduledRequest], error: Exception) -> None:
        """A forward has failed: of one request, that is its end; of several, each is run alone from here."""
        if len(batch) == 1:
            self._fail(batch[0].state, error)
        else:
            self._apart = [part.state for part in batch]

    def _fail(self, state: RequestState, error: Exception) -> None:
        """Ends a request with an error; what it has stored may be no numbers, so nobody takes it over."""
        state.request.error, state.request.finished = error, True
        self._failed.append(state.request)
        if state.handle < 0:
            self._waiting.remove(state)
        else:
            self._let_go(state)
        state.request.noise.forget()

    def _take_failed(self) -> list[Request]:
        failed, self._failed = self._failed, []
        return failed

    def _release(self, state: RequestState) -> None:
        """Frees what a running request holds; its prefix stays for others to match."""
        request, handle = state.request, state.handle
        self._cache.cache_prefix(handle, request.tokens[: self._cache.length(handle)], request.cache_salt)
        self._let_go(state)

    def _let_go(self, state: RequestState) -> None:
        # Out of the lists first: an interrupt must not free a handle twice.
        handle = state.handle
        self._running.remove(state)
        self._apart = [other for other in self._apart if other is not state]
        state.handle = -1
        self._cache.close(handle)
        self._drafters.close(state)

    def _finish(self, state: RequestState) -> None:
        if state.handle < 0:
            self._waiting.remove(state)
        else:
            self._release(state)
        state.request.noise.forget()
