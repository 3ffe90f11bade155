"""One round of the engine, piece by piece: who takes part, the rows of the forward, and the verdict on each draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.device_rounds import ARGMAX, Asked, chosen_there
from runtime.drafters import Draft, Request
from runtime.metrics import Metrics
from runtime.rows import Rows, integers
from runtime.sampling import Distributions, Logits, greedy_choices
from runtime.verify import Rule, Verdict, coupled, depths, greedy, paths, rejection, typical


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


def asked_of(request: Request, draft: Draft, rule: Rule) -> list[Asked]:
    """What a device is to choose by, for each of the n + 1 nodes of a draft."""
    if not chosen_there(request.sampling, rule):
        return [ARGMAX] * (len(draft.parents) + 1)
    position = len(request.tokens)
    return [Asked(request.sampling, position + depth) for depth in (0, *(1 + depth for depth in depths(draft)))]


def judge(
    request: Request, draft: Draft, logits: Logits, choices: list[int], rule: Rule, chosen: bool = False
) -> Verdict:
    """What the request's rule makes of its draft. logits (n + 1, V) of the draft's nodes; `choices`: their argmax.

    chosen  `choices` are what a device chose by `asked_of` instead.
    """
    sampling, position = request.sampling, len(request.tokens)
    if (sampling.greedy and sampling.plain) or (chosen and chosen_there(sampling, rule)):
        return greedy(choices, draft)
    context = (sampling, request.tokens, paths(draft), request.prompt_length, request.stop_tokens)
    if sampling.greedy:
        return greedy(greedy_choices(logits, *context), draft)
    rows = Distributions(logits, *context)
    if rule == "coupled":
        return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
    if rule == "typical":
        return typical(rows, draft, position, sampling.seed, request.noise.exponential)
    return rejection(rows, draft, position, sampling.seed)
