"""Continuous batching: requests share forwards, and join and leave at any round.

A round drafts for every request that is decoding, and runs one forward of the target over all drafts and over pieces of
the prompts that are still to be read. The target's cache holds all of a request's tokens but the last, which is fed
together with its next draft. One request is a batch of one: the same loop serves it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.controller import Controller, Drafted, Round
from runtime.drafters import Draft, Drafter, Outcome, Request
from runtime.errors import UserError
from runtime.metrics import Clock, Metrics
from runtime.rows import Cache, Decoder, Rows, integers
from runtime.sampling import Distributions, Logits, finite_choices, greedy_choices, host
from runtime.stopping import kept
from runtime.verify import Rule, Verdict, coupled, depths, greedy, paths, rejection, require_sound, typical

# Rows of prompts in one forward: all of them where nobody waits for a next token, fewer where others do.
PREFILL_ROWS = 512
MIXED_ROWS = 128


@dataclass(eq=False)
class Live:
    """A request with its place in the target's cache, and what has been counted of it.

    number   the order in which requests came.
    handle   None while the request waits.
    started  when it came, by the engine's clock.
    """

    request: Request
    number: int
    metrics: Metrics
    started: float
    handle: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens that it can come to need."""
        return self.request.prompt_length + self.request.max_new_tokens


class Work(NamedTuple):
    """One request's part of a forward: `fed` of its tokens from `first` on, then its draft of at most `budget`.

    judged    whether its last token is among them, so that a next one comes of it.
    decoding  whether it goes on with its text, rather than with its prompt or with what it had before it was put back.
    """

    one: Live
    first: int
    fed: int
    budget: int
    judged: bool
    decoding: bool


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
        self._draft_length = draft_length
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
        drafts = self._propose(drafting)
        drafted = self.clock.now()
        tokens, rows, at = _rows(work, drafts)
        judged = [part for part in work if part.judged]
        lengths = [len(part.one.request.tokens) for part in judged]
        try:
            out = self._decoder.forward(tokens, rows, self._cache, at)
            outcomes = self._settle(judged, drafts, host(out.logits), out.hidden)
        except BaseException:
            # Slots that the forward took and may not have written: nobody must come to read or to adopt them.
            for part in work:
                self._cache.truncate(_handle(part.one), part.first)
            raise
        for part, length in zip(judged, lengths, strict=True):
            if not part.decoding:
                # The prompt is complete: others that begin like it need not read it again.
                self._cache.publish(_handle(part.one), part.one.request.tokens[:length])
        verified = self.clock.now()
        self._drafter.observe(outcomes)
        self._account(work, drafts, outcomes, lengths, (started, drafted, verified, self.clock.now()), len(tokens))
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
        return not self._cache.shortage({_handle(part.one): part.fed + part.budget for part in work})

    def _wanted(self) -> list[Work]:
        """The decoding requests with their drafts, and pieces of the prompts as far as the rows go."""
        held = [self._cache.length(_handle(one)) for one in self._live]
        decoding = [
            one.metrics.arrivals[0] != [] and len(one.request.tokens) == first + 1
            for one, first in zip(self._live, held, strict=True)
        ]
        gamma = self._gamma([one for one, ready in zip(self._live, decoding, strict=True) if ready])
        room = MIXED_ROWS if any(decoding) else PREFILL_ROWS
        work = []
        for one, first, ready in zip(self._live, held, decoding, strict=True):
            count = len(one.request.tokens) - first
            if ready:
                # A round adds the target's own token as well, so the last token of a text needs no draft.
                work.append(Work(one, first, 1, max(0, min(gamma, one.request.missing - 1)), True, True))
            elif room > 0:
                piece = min(count, room)
                room -= piece
                work.append(Work(one, first, piece, 0, piece == count, False))
        return work

    def _gamma(self, decoding: Sequence[Live]) -> int:
        if not decoding:
            return 0
        missing = max(one.request.missing for one in decoding) - 1
        if isinstance(self._draft_length, Controller):
            return self._draft_length.choose(len(decoding), missing)
        return min(self._draft_length, missing)

    def _put_back(self, one: Live) -> None:
        """Preempts: the pages go, tokens and noise stay; the text goes on from its last token when there is room."""
        handle = _handle(one)
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

    def _settle(
        self, judged: Sequence[Work], drafts: dict[int, Draft], logits: Logits, hidden: Tensor
    ) -> list[Outcome]:
        """Judges each draft, appends what was accepted, and rolls the cache back to it."""
        choices = finite_choices(logits, "target")
        outcomes, base = [], 0
        for part in judged:
            one = part.one
            draft = drafts.get(one.number, _EMPTY)
            end = base + len(draft.tokens) + 1
            verdict = self._judge(one.request, draft, logits[base:end], choices[base:end])
            request, before = one.request, len(one.request.tokens)
            gained = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            count, stopped = kept(gained, request.stop_tokens, request.stop_strings)
            gained = gained[:count]
            path = verdict.path[: len(gained)]
            request.tokens += gained
            request.noise.forget(len(request.tokens))
            request.finished = stopped or request.missing <= 0
            self._roll_back(_handle(one), before, path, len(draft.tokens))
            outcomes.append(Outcome(request, path, len(path), _along(hidden[base:end], path)))
            one.metrics.kv_bytes = len(request.tokens) * self._cache.bytes_per_token()
            one.metrics.arrivals[0] += [self.clock.now() - one.started] * len(gained)
            base = end
        return outcomes

    def _judge(self, request: Request, draft: Draft, logits: Logits, choices: list[int]) -> Verdict:
        """`choices`: the argmax of each row of the logits."""
        sampling, position = request.sampling, len(request.tokens)
        if sampling.greedy and sampling.plain:
            return greedy(choices, draft)
        context = (sampling, request.tokens, paths(draft), request.prompt_length, request.stop_tokens)
        if sampling.greedy:
            return greedy(greedy_choices(logits, *context), draft)
        rows = Distributions(logits, *context)
        if self._rule == "coupled":
            return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
        if self._rule == "typical":
            return typical(rows, draft, position, sampling.seed, request.noise.exponential)
        return rejection(rows, draft, position, sampling.seed)

    def _roll_back(self, handle: int, before: int, path: list[int], drafted: int) -> None:
        """Leaves in the cache the `before` tokens of the text so far and the accepted path."""
        if path != list(range(len(path))):
            self._cache.keep(handle, before, path)
        elif len(path) < drafted:
            self._cache.truncate(handle, before + len(path))

    def _account(
        self,
        work: Sequence[Work],
        drafts: dict[int, Draft],
        outcomes: Sequence[Outcome],
        lengths: Sequence[int],
        times: tuple[float, float, float, float],
        width: int,
    ) -> None:
        """Counts the round, and gives each request its share of the time: of drafting by heads, of the rest by rows."""
        started, drafted, verified, ended = times
        settled = iter(zip(outcomes, lengths, strict=True))
        learned = []
        for part in work:
            m, draft = part.one.metrics, drafts.get(part.one.number, _EMPTY)
            rows = part.fed + len(draft.tokens)
            target_share = rows / width
            draft_share = 1 / len(drafts) if part.one.number in drafts else 0.0
            spent = (drafted - started) * draft_share + (ended - drafted) * target_share
            if not drafts:
                spent += (drafted - started) * target_share
            m.seconds += spent
            outcome, length = next(settled) if part.judged else (None, 0)
            if outcome is None or not part.decoding:
                m.prompt_seconds += spent
                continue
            at = depths(draft)
            m.count_draft(at, [at[i] for i in outcome.path])
            m.rounds += 1
            m.gained += len(part.one.request.tokens) - length
            m.target_forwards += 1
            m.target_rows += rows
            m.draft_seconds += (drafted - started) * draft_share
            m.target_seconds += (verified - drafted) * target_share
            chain = draft.parents == list(range(-1, len(at) - 1))
            learned.append((part.budget, Drafted(len(draft.tokens), outcome.length, chain)))
        if isinstance(self._draft_length, Controller) and len(learned) == len(work):
            budget = max(part.budget for part in work)
            # A text about to end drafts less than the others: that says nothing of this γ.
            whole = tuple(one for own, one in learned if own == budget)
            self._draft_length.observe(Round(len(work), budget, whole, width, drafted - started, ended - drafted))

    def _release(self, one: Live) -> None:
        """Frees what a running request holds. Out of the list first: an interrupt must not free a handle twice."""
        self._live.remove(one)
        handle, one.handle = _handle(one), None
        self._cache.close(handle)
        self._drafter.close(one.request)

    def _drop(self, one: Live) -> None:
        if one.handle is None:
            self._waiting.remove(one)
        else:
            self._cache.publish(one.handle, one.request.tokens[: self._cache.length(one.handle)])
            self._release(one)
        one.request.noise.forget()


_EMPTY = Draft()


def _handle(one: Live) -> int:
    assert one.handle is not None
    return one.handle


def _rows(work: Sequence[Work], drafts: dict[int, Draft]) -> tuple[Tensor, Rows, Tensor | None]:
    """Tokens and rows of a forward, and which rows' logits are wanted (None: all)."""
    tokens: list[int] = []
    request: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    at: list[int] = []
    for part in work:
        text, draft = part.one.request.tokens, drafts.get(part.one.number, _EMPTY)
        base, last = len(tokens), part.first + part.fed
        tokens += text[part.first : last]
        position += range(part.first, last)
        parent += [-1, *range(base, base + part.fed - 1)]
        if part.judged:
            end = len(tokens) - 1
            at += range(end, end + 1 + len(draft.tokens))
            tokens += draft.tokens
            position += [last + depth for depth in depths(draft)]
            parent += [end + 1 + above for above in draft.parents]
        request += [_handle(part.one)] * (len(tokens) - base)
    where = Rows(integers(request), integers(position), integers(parent))
    return integers(tokens), where, None if len(at) == len(tokens) else integers(at)


def _along(hidden: Tensor, path: list[int]) -> Tensor | None:
    """Of hidden (n + 1, hidden), of the text's last token and a draft, the rows of the text and the accepted path.

    A copy: the decoder may use its memory again. None where the decoder gives no hidden states.
    """
    if not len(hidden):
        return None
    if path == list(range(len(path))):
        return hidden[: len(path) + 1].clone()
    return hidden[[0, *(1 + i for i in path)]]
