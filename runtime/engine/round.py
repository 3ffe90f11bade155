"""The parts of one round: who takes part, the rows of the forward, what becomes of each draft, and what it took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from runtime.cache.tree_rows import Trees
from runtime.contract import Cache, Rows
from runtime.engine.metrics import Metrics
from runtime.model.on_device import ARGMAX, NON_FINITE, RowSampling
from runtime.sampling.distribution import Distributions, Logits, not_finite
from runtime.sampling.stopping import kept
from runtime.speculative.choice import Choice
from runtime.speculative.draft import Draft, Drafter, NoDrafter, Outcome, Request, Rule, WeighsRows
from runtime.speculative.draft_length import LONGEST, Controller
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.verify import (
    Acceptance,
    coupled,
    greedy,
    greedy_rows,
    rejection,
    sampled_on_device,
    typical,
)
from runtime.speculative.wanted import RoundEvent

NO_DRAFT = Draft()
NO_ROWS = range(0)
_NO_TOKEN = -2  # no model's, and not NON_FINITE


@dataclass(eq=False)
class Proposer:
    """A drafter under its name in an engine: it drafts at most `most` tokens a round, or what its controller says.

    among, choice  those that draft in its place, by the kind of a text (choice.KINDS) and by name, and who chooses of
                   them; None: it drafts itself.
    weighing       those of its drafter's parts that end drafts where a row is not worth its time.
    resting        whether its controller rests this round: it is told of nothing, and reads no states.
    """

    name: str
    drafter: Drafter
    controller: Controller | None = None
    most: int = LONGEST
    among: Mapping[str, Mapping[str, "Proposer"]] = field(default_factory=dict)
    choice: Choice | None = None
    resting: bool = False

    def __post_init__(self) -> None:
        self.drafts = not isinstance(self.drafter, NoDrafter)
        self._chained = self.drafter if isinstance(self.drafter, ChainedDrafter) else None
        parts = (self.drafter,) if self._chained is None else self._chained.drafters
        self.weighing = [part for part in parts if isinstance(part, WeighsRows)]
        # Whose knowledge of a text drafts wait for; chains share it with others that end with the same drafter.
        self.reader = parts[-1].name

    def prepare(self) -> None:
        """Tells its drafter, which others may share, what its controller allows: before it is asked for drafts."""
        if self._chained is not None:
            self._chained.limits = {} if self.controller is None else self.controller.limits
        if self.weighing and self.controller is not None and self.controller.worth is not None:
            for weighing in self.weighing:
                weighing.worth = self.controller.worth

    @property
    def asked(self) -> int:
        """Of a chain of drafters how many were asked last."""
        return 1 if self._chained is None else self._chained.asked


@dataclass(eq=False)
class RequestState:
    """A request with its place in the target's cache, and what has been counted of it.

    number    the order in which requests came.
    asked     whom it asked to draft for it.
    proposer  who drafts for it: the same, or whom a choice named for this round.
    handle    in the target's cache; −1 while the request waits.
    started   when it came, by the engine's clock.
    drafted   whether its last round drafted, so that its drafter knows the text but for that round's tokens.
    read      how many tokens of its text its drafter knows.
    forced    what its grammar forces after the text: this round's draft, instead of the drafter's.
    forcing   the most tokens of that: fewer after some were not accepted.
    admitted  whether it has begun.
    greedy    whether the most probable tokens are all that it needs of the target's logits.
    """

    request: Request
    number: int
    metrics: Metrics
    started: float
    asked: Proposer
    proposer: Proposer = field(init=False)
    handle: int = -1
    drafted: bool = False
    read: int = 0
    forced: Sequence[int] = ()
    forcing: int = LONGEST
    admitted: bool = False
    _read: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proposer = self.asked
        request, wanted = self.request, self.request.wanted
        self.greedy = request.sampling.greedy and request.sampling.plain and request.grammar is None
        self.greedy = self.greedy and wanted.logprobs is None and wanted.prompt_logprobs is None

    def ask(self, proposer: Proposer) -> None:
        """Has this one draft from here on; how far each has read the text is kept."""
        before, self.proposer = self.proposer, proposer
        if proposer.reader != before.reader:
            self._read[before.reader] = self.read
            self.drafted, self.read = False, self._read.get(proposer.reader, 0)

    @property
    def capacity(self) -> int:
        """Tokens that it can come to need."""
        return self.request.prompt_length + self.request.max_new_tokens

    @property
    def room(self) -> int:
        """The most tokens that may be drafted. A round adds the target's own as well: a text's last needs no draft."""
        most, bound = max(0, self.request.missing - 1), self.request.draft_length
        return most if bound is None else min(most, bound)


class ScheduledRequest(NamedTuple):
    """One request's part of a forward: `fed` of its tokens from `first` on, then its draft of at most `budget`.

    samples   whether its last token is among them, so that a next one comes of it.
    decoding  whether it goes on with its text, rather than with its prompt or with what it had when it was preempted.
    scored    which of its tokens' logits are asked for besides: those that tell of the next token of the prompt.
    """

    state: RequestState
    first: int
    fed: int
    budget: int
    samples: bool
    decoding: bool
    scored: range = NO_ROWS

    @property
    def end(self) -> int:
        """Where the draft begins: where it samples, the length of the text before the round."""
        return self.first + self.fed


def resting(batch: Sequence[ScheduledRequest]) -> Controller | None:
    """Who is told that a round of one resting drafter's requests rested, and nothing else; None: it is another one."""
    first = batch[0].state.proposer
    if not first.resting:
        return None
    for part in batch:
        if part.state.asked is not first or part.budget > 0 or not part.decoding:
            return None
    return first.controller


def aligned(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft]) -> list[Draft]:
    """A draft for each part of the round, from those of the parts with a budget."""
    found = iter(drafts)
    return [next(found) if part.budget > 0 else NO_DRAFT for part in batch]


def forward_rows(
    batch: Sequence[ScheduledRequest], drafts: Sequence[Draft]
) -> tuple[list[int], Rows, list[int] | None]:
    """Tokens and rows of a forward, and which rows' logits are wanted (None: all)."""
    tokens: list[int] = []
    at: list[int] = []
    spans: list[tuple[int, int, int]] = []
    chains = True
    for part, draft in zip(batch, drafts, strict=True):
        base = len(tokens)
        tokens += part.state.request.tokens[part.first : part.end]
        at += [base + row - part.first for row in part.scored]
        if part.samples:
            end = len(tokens) - 1
            at += range(end, end + 1 + len(draft.tokens))
            if draft.tokens:
                tokens += draft.tokens
                chains = chains and draft.is_chain
        spans.append((part.state.handle, part.first, len(tokens) - base))
    rows = Rows.chains(spans) if chains else Trees(spans, [_parents(*one) for one in zip(batch, drafts, strict=True)])
    return tokens, rows, None if len(at) == len(tokens) else at


def _parents(part: ScheduledRequest, draft: Draft) -> list[int] | None:
    """Of a request's rows, whose draft follows what it is fed; None: they are a chain."""
    if not part.samples or draft.is_chain:
        return None
    return [*range(-1, part.fed - 1), *(part.fed + above for above in draft.parents)]


def row_samplings(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], rule: Rule) -> list[RowSampling]:
    """How a device samples at each row of logits: for each part its prompt's, then its draft's n + 1 nodes."""
    rows: list[RowSampling] = []
    for part, draft in zip(batch, drafts, strict=True):
        rows += [ARGMAX] * len(part.scored)
        if not part.samples:
            continue
        request = part.state.request
        sampling = request.sampling
        if request.grammar is None and sampled_on_device(sampling, request.rule or rule):
            rows += [RowSampling(sampling, part.end + depth) for depth in (0, *(1 + depth for depth in draft.depths))]
        else:
            rows += [ARGMAX] * (len(draft.tokens) + 1)
    return rows


def refused(drafts: Sequence[Draft]) -> list[Draft]:
    """Drafts of the same shapes of which no token is ever accepted: for forwards that were made with other ones."""
    return [Draft([_NO_TOKEN] * len(draft.tokens), draft.parents) for draft in drafts]


def verify(
    request: Request, draft: Draft, logits: Logits, at: slice, tokens: Sequence[int], rule: Rule, on_device: bool
) -> Acceptance:
    """What the request's rule accepts of its draft.

    logits  (m, V) of the round; at: which of them are the draft's n + 1 nodes'. Greedy texts need no look at them.
    tokens  the nodes' argmax; with `on_device` what a device sampled by `row_samplings`. NON_FINITE: no numbers.

    Raises UserError where the logits of a node that the text comes to are no numbers.
    """
    sampling, position, grammar = request.sampling, len(request.tokens), request.grammar
    chosen = (sampling.greedy and sampling.plain) or (on_device and sampled_on_device(sampling, rule))
    if chosen and grammar is None:
        accepted = greedy(tokens, draft)
        if accepted.next_token == NON_FINITE:
            raise not_finite("target")
        return accepted
    context = (sampling, request.tokens, draft.paths, request.prompt_length, request.stop_tokens, grammar)
    rows = Distributions(logits[at], *context)
    if NON_FINITE in tokens:
        rows.forbid([row for row, token in enumerate(tokens) if token == NON_FINITE])
    if sampling.greedy:
        known = sampling.plain
        return greedy_rows(lambda row: rows.choice(row, tokens[row] if known else None), draft)
    if rule == "coupled":
        return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
    if rule == "typical":
        return typical(rows, draft, position, sampling.seed, request.noise.exponential)
    return rejection(rows, draft, position, sampling.seed)


def append_accepted(request: Request, draft: Draft, accepted: Acceptance, hidden: Tensor, first: int) -> Outcome:
    """Appends the accepted tokens and the target's own to the text, as far as its stop tokens and strings let it go.

    hidden  (rows, hidden) of the round, of no rows where the decoder gives none; first: the row of the text's last
            token, behind which the draft's are.
    """
    gained = [draft.tokens[i] for i in accepted.path]
    gained.append(accepted.next_token)
    count, stopped = kept(gained, request.stop_tokens, request.stop_strings)
    path = accepted.path[:count]
    request.tokens += gained[:count]
    if request.grammar is not None:
        request.grammar.advance(gained[:count])
    request.noise.forget(len(request.tokens))
    request.finished = stopped or request.missing <= 0
    # A tensor's length is Python, and its shape an object: its number of elements is neither.
    return Outcome(request, path, len(path), hidden if hidden.numel() else None, first)


def roll_back(cache: Cache, part: ScheduledRequest, draft: Draft, outcome: Outcome) -> None:
    """Leaves in the cache the text before the draft and the accepted path."""
    if outcome.path != [*range(outcome.length)]:
        cache.keep(part.state.handle, part.end, outcome.path)
    elif outcome.length < len(draft.tokens):
        cache.truncate(part.state.handle, part.end + outcome.length)


def note_round(part: ScheduledRequest, draft: Draft, outcome: Outcome, times: Sequence[float]) -> None:
    """Adds the round to what its request has found; arguments as for `shares_of`."""
    state, request = part.state, part.state.request
    name = ""
    if part.budget > 0:
        name = "grammar" if state.forced else state.proposer.name
    known = NO_DRAFT if _NO_TOKEN in draft.tokens else draft
    started, drafted, _, ended = times
    new = request.tokens[part.end :]
    spent = (1000 * (drafted - started), 1000 * (ended - started))
    request.found.rounds.append(RoundEvent(name, known.tokens, known.parents, outcome.path, new, *spent))


class Shares(NamedTuple):
    """Seconds of a round: of drafting those of one draft; of the target with verifying, and of all behind the drafts or
    where there are none, those of one row."""

    draft: float
    target: float
    rest: float


def shares_of(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], times: Sequence[float]) -> Shares:
    """How a round's time is shared by its requests: of drafting by heads, else by rows.

    times  when the round began, its drafts were there, they were verified, and all was done.
    """
    started, drafted, verified, ended = times
    heads = width = 0
    for part, draft in zip(batch, drafts, strict=True):
        heads += part.budget > 0
        width += part.fed + len(draft.tokens)
    if heads:
        return Shares((drafted - started) / heads, (verified - drafted) / width, (ended - drafted) / width)
    return Shares(0.0, (verified - drafted) / width, (ended - started) / width)


def account(part: ScheduledRequest, draft: Draft, outcome: Outcome | None, shares: Shares) -> None:
    """Adds a request's part of a round to its metrics."""
    metrics, rows = part.state.metrics, part.fed + len(draft.tokens)
    drafting = shares.draft if part.budget > 0 else 0.0
    spent = drafting + shares.rest * rows
    metrics.seconds += spent
    if outcome is None or not part.decoding:
        metrics.prompt_seconds += spent
        return
    if not metrics.first_drafted:
        metrics.first_seconds += drafting
        metrics.first_drafted = len(draft.tokens)
    gained = len(outcome.request.tokens) - part.end
    metrics.count_draft(draft.depths, [draft.depths[i] for i in outcome.path], gained > outcome.length)
    if part.budget > 0 and part.state.forced:
        metrics.forced += len(draft.tokens)
        metrics.forced_accepted += outcome.length
        whole = outcome.length == len(draft.tokens)
        part.state.forcing = min(2 * part.state.forcing, LONGEST) if whole else max(1, outcome.length)
    metrics.rounds += 1
    metrics.gained += gained
    metrics.target_forwards += 1
    metrics.target_rows += rows
    metrics.draft_seconds += drafting
    metrics.target_seconds += shares.target * rows
