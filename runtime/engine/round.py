"""The parts of one round: who takes part, the rows of the forward, what becomes of each draft, and what it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.contract import Rows, integers
from runtime.engine.metrics import Metrics
from runtime.model.on_device import ARGMAX, RowSampling
from runtime.sampling.distribution import Distributions, Logits
from runtime.sampling.stopping import kept
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.draft_length import Controller, Drafted, Round
from runtime.speculative.verify import Acceptance, Rule, coupled, greedy, rejection, sampled_on_device, typical

NO_DRAFT = Draft()


@dataclass(eq=False)
class RequestState:
    """A request with its place in the target's cache, and what has been counted of it.

    number   the order in which requests came.
    handle   in the target's cache; −1 while the request waits.
    started  when it came, by the engine's clock.
    drafted  whether its last round drafted, so that its drafter knows the text but for that round's tokens.
    """

    request: Request
    number: int
    metrics: Metrics
    started: float
    handle: int = -1
    drafted: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that it can come to need."""
        return self.request.prompt_length + self.request.max_new_tokens


class ScheduledRequest(NamedTuple):
    """One request's part of a forward: `fed` of its tokens from `first` on, then its draft of at most `budget`.

    samples   whether its last token is among them, so that a next one comes of it.
    decoding  whether it goes on with its text, rather than with its prompt or with what it had when it was preempted.
    """

    state: RequestState
    first: int
    fed: int
    budget: int
    samples: bool
    decoding: bool

    @property
    def end(self) -> int:
        """Where the draft begins: where it samples, the length of the text before the round."""
        return self.first + self.fed


def aligned(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft]) -> list[Draft]:
    """A draft for each part of the round, from those of the parts with a budget."""
    found = iter(drafts)
    return [next(found) if part.budget > 0 else NO_DRAFT for part in batch]


def forward_rows(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft]) -> tuple[Tensor, Rows, Tensor | None]:
    """Tokens and rows of a forward, and which rows' logits are wanted (None: all)."""
    tokens: list[int] = []
    request: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    at: list[int] = []
    for part, draft in zip(batch, drafts, strict=True):
        base, last = len(tokens), part.end
        tokens += part.state.request.tokens[part.first : last]
        position += range(part.first, last)
        parent += [-1, *range(base, base + part.fed - 1)]
        if part.samples:
            end = len(tokens) - 1
            at += range(end, end + 1 + len(draft.tokens))
            tokens += draft.tokens
            position += [last + depth for depth in draft.depths]
            parent += [end + 1 + above for above in draft.parents]
        request += [part.state.handle] * (len(tokens) - base)
    rows = Rows(integers(request), integers(position), integers(parent))
    return integers(tokens), rows, None if len(at) == len(tokens) else integers(at)


def row_samplings(batch: Sequence[ScheduledRequest], drafts: Sequence[Draft], rule: Rule) -> list[RowSampling]:
    """How a device samples at each row of logits: for each part that samples, its draft's n + 1 nodes."""
    rows: list[RowSampling] = []
    for part, draft in zip(batch, drafts, strict=True):
        if not part.samples:
            continue
        sampling = part.state.request.sampling
        if sampled_on_device(sampling, rule):
            rows += [RowSampling(sampling, part.end + depth) for depth in (0, *(1 + depth for depth in draft.depths))]
        else:
            rows += [ARGMAX] * (len(draft.tokens) + 1)
    return rows


def verify(
    request: Request, draft: Draft, logits: Logits, tokens: Sequence[int], rule: Rule, on_device: bool
) -> Acceptance:
    """What the request's rule accepts of its draft.

    logits  (n + 1, V) of the draft's nodes.
    tokens  their argmax; with `on_device` what a device sampled by `row_samplings`.
    """
    sampling, position = request.sampling, len(request.tokens)
    if (sampling.greedy and sampling.plain) or (on_device and sampled_on_device(sampling, rule)):
        return greedy(tokens, draft)
    context = (sampling, request.tokens, draft.paths, request.prompt_length, request.stop_tokens)
    rows = Distributions(logits, *context)
    if sampling.greedy:
        return greedy(rows.argmax(), draft)
    if rule == "coupled":
        return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
    if rule == "typical":
        return typical(rows, draft, position, sampling.seed, request.noise.exponential)
    return rejection(rows, draft, position, sampling.seed)


def append_accepted(request: Request, draft: Draft, accepted: Acceptance, hidden: Tensor) -> Outcome:
    """Appends the accepted tokens and the target's own to the text, as far as its stop tokens and strings let it go.

    hidden  (n + 1, hidden) of the text's last token and the draft; of no rows where the decoder gives none.
    """
    gained = [*(draft.tokens[i] for i in accepted.path), accepted.next_token]
    count, stopped = kept(gained, request.stop_tokens, request.stop_strings)
    path = accepted.path[:count]
    request.tokens += gained[:count]
    request.noise.forget(len(request.tokens))
    request.finished = stopped or request.missing <= 0
    straight = path == list(range(len(path)))
    along = hidden[: len(path) + 1] if straight or not len(hidden) else hidden[[0, *(1 + i for i in path)]]
    return Outcome(request, path, len(path), along if len(hidden) else None)


def account(
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome | None],
    times: Sequence[float],
) -> None:
    """Adds the round to its requests' metrics, with each one's share of the time: of drafting by heads, else by rows.

    times  when the round began, its drafts were there, they were verified, and all was done.
    """
    started, drafted, verified, ended = times
    heads = sum(part.budget > 0 for part in batch)
    width = sum(part.fed + len(draft.tokens) for part, draft in zip(batch, drafts, strict=True))
    for part, draft, outcome in zip(batch, drafts, outcomes, strict=True):
        metrics, rows = part.state.metrics, part.fed + len(draft.tokens)
        target_share = rows / width
        drafting = (drafted - started) / heads if part.budget > 0 else 0.0
        spent = drafting + (ended - drafted) * target_share
        if not heads:
            spent += (drafted - started) * target_share
        metrics.seconds += spent
        if outcome is None or not part.decoding:
            metrics.prompt_seconds += spent
            continue
        if not metrics.drafted:
            metrics.first_seconds += drafting
            metrics.first_drafted = len(draft.tokens)
        metrics.count_draft(draft.depths, [draft.depths[i] for i in outcome.path])
        metrics.rounds += 1
        metrics.gained += len(outcome.request.tokens) - part.end
        metrics.target_forwards += 1
        metrics.target_rows += rows
        metrics.draft_seconds += drafting
        metrics.target_seconds += (verified - drafted) * target_share


def learn(
    controller: Controller,
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome | None],
    times: Sequence[float],
) -> None:
    """Tells the controller of a round in which every request went on with its text; arguments as for `account`."""
    started, drafted, _, ended = times
    if controller.resting(len(batch)):
        controller.rested(ended - started)
        return
    budget = max(part.budget for part in batch)
    found = tuple(
        Drafted(len(draft.tokens), outcome.length, draft.is_chain)
        for part, draft, outcome in zip(batch, drafts, outcomes, strict=True)
        # A text about to end drafts less than the others: that says nothing of this γ.
        if outcome is not None and part.budget == budget > 0
    )
    behind = any(part.budget > 0 and not part.state.drafted for part in batch)
    width = sum(1 + len(draft.tokens) for draft in drafts)
    controller.observe(Round(len(batch), budget, found, width, drafted - started, ended - drafted, behind))
