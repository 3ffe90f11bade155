"""One round of the engine, piece by piece: who takes part, the rows of the forward, and the verdict on each draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.contract import Rows, integers
from runtime.engine.metrics import Metrics
from runtime.model.on_device import ARGMAX, RowSampling
from runtime.sampling.distribution import Distributions, Logits, greedy_tokens
from runtime.speculative.deferred import sampled_on_device
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.draft_length import Controller, Drafted, Round
from runtime.speculative.verify import Acceptance, Rule, coupled, depths, greedy, paths, rejection, typical


@dataclass(eq=False)
class Live:
    """A request with its place in the target's cache, and what has been counted of it.

    number   the order in which requests came.
    handle   None while the request waits.
    started  when it came, by the engine's clock.
    drafted  whether its last round drafted, so that its drafter knows the text but for that round's tokens.
    """

    request: Request
    number: int
    metrics: Metrics
    started: float
    handle: int | None = None
    drafted: bool = False

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


EMPTY = Draft()


def handle_of(one: Live) -> int:
    assert one.handle is not None
    return one.handle


def rows_of(work: Sequence[Work], drafts: dict[int, Draft]) -> tuple[Tensor, Rows, Tensor | None]:
    """Tokens and rows of a forward, and which rows' logits are wanted (None: all)."""
    tokens: list[int] = []
    request: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    at: list[int] = []
    for part in work:
        text, draft = part.one.request.tokens, drafts.get(part.one.number, EMPTY)
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
        request += [handle_of(part.one)] * (len(tokens) - base)
    where = Rows(integers(request), integers(position), integers(parent))
    return integers(tokens), where, None if len(at) == len(tokens) else integers(at)


def along(hidden: Tensor, path: list[int]) -> Tensor | None:
    """Of hidden (n + 1, hidden), of the text's last token and a draft, the rows of the text and the accepted path.

    They hold until the target's next forward. None where the decoder gives no hidden states.
    """
    if not len(hidden):
        return None
    if path == list(range(len(path))):
        return hidden[: len(path) + 1]
    return hidden[[0, *(1 + i for i in path)]]


def asked_of(request: Request, draft: Draft, rule: Rule) -> list[RowSampling]:
    """What a device is to choose by, for each of the n + 1 nodes of a draft."""
    if not sampled_on_device(request.sampling, rule):
        return [ARGMAX] * (len(draft.parents) + 1)
    position = len(request.tokens)
    return [RowSampling(request.sampling, position + depth) for depth in (0, *(1 + depth for depth in depths(draft)))]


def judge(
    request: Request, draft: Draft, logits: Logits, choices: list[int], rule: Rule, chosen: bool = False
) -> Acceptance:
    """What the request's rule makes of its draft. logits (n + 1, V) of the draft's nodes; `choices`: their argmax.

    chosen  `choices` are what a device chose by `asked_of` instead.
    """
    sampling, position = request.sampling, len(request.tokens)
    if (sampling.greedy and sampling.plain) or (chosen and sampled_on_device(sampling, rule)):
        return greedy(choices, draft)
    context = (sampling, request.tokens, paths(draft), request.prompt_length, request.stop_tokens)
    if sampling.greedy:
        return greedy(greedy_tokens(logits, *context), draft)
    rows = Distributions(logits, *context)
    if rule == "coupled":
        return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
    if rule == "typical":
        return typical(rows, draft, position, sampling.seed, request.noise.exponential)
    return rejection(rows, draft, position, sampling.seed)


class Counted(NamedTuple):
    """One round: how many of its requests went on with their text, each draft with its budget, the forward's rows.

    draft_seconds, rest_seconds  wall time until the drafts were there, and from then to the round's end.
    """

    decoding: int
    drafts: list[tuple[int, Drafted]]
    width: int
    draft_seconds: float
    rest_seconds: float


def account(
    work: Sequence[Work],
    drafts: dict[int, Draft],
    outcomes: Sequence[Outcome],
    lengths: Sequence[int],
    times: tuple[float, float, float, float],
    width: int,
) -> Counted:
    """Counts the round, and gives each request its share of the time: of drafting by heads, of the rest by rows.

    outcomes, lengths  of each part that was judged, in order: what came of it, and its text's length before.
    times              when the round began, its drafts were there, they were judged, and all was done.
    width              rows of the forward.
    """
    started, drafted, verified, ended = times
    settled = iter(zip(outcomes, lengths, strict=True))
    learned: list[tuple[int, Drafted]] = []
    decoding = 0
    for part in work:
        m, draft = part.one.metrics, drafts.get(part.one.number, EMPTY)
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
        drafting = (drafted - started) * draft_share
        if not m.drafted:
            m.first_seconds += drafting
            m.first_drafted = len(at)
        m.count_draft(at, [at[i] for i in outcome.path])
        m.rounds += 1
        m.gained += len(part.one.request.tokens) - length
        m.target_forwards += 1
        m.target_rows += rows
        m.draft_seconds += drafting
        m.target_seconds += (verified - drafted) * target_share
        decoding += 1
        if part.budget > 0:
            chain = draft.parents == [*range(-1, len(at) - 1)]
            learned.append((part.budget, Drafted(len(at), outcome.length, chain)))
    return Counted(decoding, learned, width, drafted - started, ended - drafted)


def learn(controller: Controller, work: Sequence[Work], counted: Counted) -> None:
    """Tells the controller of a round in which every request went on with its text."""
    if controller.resting(len(work)):
        controller.rested(counted.draft_seconds + counted.rest_seconds)
        return
    whole: tuple[Drafted, ...] = ()
    budget, behind = 0, False
    if counted.drafts:
        budget = max(own for own, _ in counted.drafts)
        # A text about to end drafts less than the others: that says nothing of this γ.
        whole = tuple(one for own, one in counted.drafts if own == budget)
        behind = any(part.budget > 0 and not part.one.drafted for part in work)
    seconds = (counted.draft_seconds, counted.rest_seconds)
    controller.observe(Round(len(work), budget, whole, counted.width, *seconds, behind))
