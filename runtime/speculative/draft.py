"""What the loop and the drafters share: a request, a draft, what became of it, and the drafters' contract.

The drafters themselves are in drafters/, one file each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from runtime.cache.tree_rows import depths
from runtime.sampling.constraint import Constraint
from runtime.sampling.noise import Memo
from runtime.sampling.params import Sampling
from runtime.sampling.stopping import StopStrings
from runtime.speculative.wanted import Found, Wanted

Text = TypeVar("Text")
# How the drafts of requests that sample are verified: verify.py.
Rule = Literal["coupled", "rejection", "typical"]
NOTHING_WANTED = Wanted()


@dataclass
class Request:
    """One text in progress, as the loop and the drafters see it; only the loop changes it.

    `tokens` are prompt and accepted output; `id` is unique among live requests; `noise` is what `coupled` samples with;
    `stop_strings` watches the output for texts that end it, None without any. `tokens` may be longer than the prompt
    from the start: the text then goes on as if it had just gained them. With max_new_tokens = 0 a prompt is only read.

    wanted        what to note down in `found`.
    drafter       the name of its drafter in the engine; None: the engine's default.
    draft_length  the most tokens drafted for it a round, whatever the engine's γ; None: no bound of its own.
    rule          verifies its drafts where it samples; None: the engine's.
    cache_salt    it takes over cached prefixes only of requests with the same.
    prediction    tokens that its text is expected to hold, for the drafter `prediction`.
    grammar       what its text must keep to; None: anything.
    drafter_fault what its drafter failed with, so that the text goes on without drafts.
    error         what ended the request, where it failed; it is `finished` then, too.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = field(default=None, repr=False, compare=False)
    finished: bool = False
    noise: Memo = field(default_factory=Memo, repr=False, compare=False)
    wanted: Wanted = NOTHING_WANTED
    drafter: str | None = None
    draft_length: int | None = None
    rule: Rule | None = None
    cache_salt: str = ""
    prediction: Sequence[int] = ()
    grammar: Constraint | None = field(default=None, repr=False, compare=False)
    drafter_fault: Exception | None = None
    found: Found = field(default_factory=Found, repr=False, compare=False)
    error: Exception | None = None

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def stopped(self) -> bool:
        """Whether the text ended with a stop token or a stop string."""
        return self.ends_with_stop_token or (self.stop_strings is not None and self.stop_strings.found)

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last new token is a stop token."""
        return len(self.tokens) > self.prompt_length and self.tokens[-1] in self.stop_tokens

    @property
    def missing(self) -> int:
        """How many tokens the text may still grow by."""
        return self.prompt_length + self.max_new_tokens - len(self.tokens)


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one request.

    tokens   n token ids, parents before children.
    parents  index of each token's parent in `tokens`; −1: it follows the request's last token. A chain is [−1, 0, 1 …].
    probs    (n, vocabulary) float64: the distribution that each token was really drawn from; None: deterministic.
    number   of a chain of drafters which one made it: 1, 2, …
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    number: int = 1

    @staticmethod
    def chain(tokens: list[int], probs: Tensor | None = None) -> "Draft":
        """Tokens of which each follows the one before it."""
        count = len(tokens)
        made = Draft(tokens, [*range(-1, count - 1)], probs)
        # Most drafts are chains, and all of a round's parts ask.
        made.__dict__.update(is_chain=True, depths=[*range(count)])
        return made

    def numbered(self, number: int) -> "Draft":
        """The same of another drafter of a chain, with what is known of it already."""
        made = Draft.__new__(Draft)
        made.__dict__.update(self.__dict__, number=number)
        return made

    @cached_property
    def depths(self) -> list[int]:
        """For each of the n tokens how many others stand between it and the text."""
        return [*range(len(self.parents))] if self.is_chain else depths(self.parents)

    @cached_property
    def paths(self) -> list[list[int]]:
        """For each of the n + 1 nodes the tokens before it: [] for the text, the path to token i for node i + 1."""
        before: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            before.append([*before[parent + 1], token])
        return before

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Indices of the tokens below each node, in draft order; −1 is the request's last token."""
        below: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(index)
        return below

    @cached_property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == [*range(-1, len(self.parents) - 1)]


class Outcome(NamedTuple):
    """What became of a draft: `path` are the accepted indices in draft order; `length` = len(path).

    The request's `tokens` already hold the accepted tokens and the one it added.

    states  the target's hidden states, if it gives any, good until its next forward: (length + 1, hidden) of the last
            token before the draft and of each accepted one; with `first` those of a whole round, where that is the row
            of the last token and the draft's n follow.
    """

    request: Request
    path: list[int]
    length: int
    states: Tensor | None = None
    first: int | None = None

    @property
    def hidden(self) -> Tensor | None:
        """(length + 1, hidden), cut out when it is asked for: most drafters never do."""
        if self.states is None or self.first is None:
            return self.states
        if self.path == [*range(self.length)]:
            return self.states[self.first : self.first + self.length + 1]
        return self.states[[self.first, *(self.first + 1 + i for i in self.path)]]


def parts(name: str) -> list[str]:
    """The drafters in a drafter's name, each once: "lookup,lookup+model" names lookup and model."""
    return list(dict.fromkeys(name.replace(",", "+").split("+")))


class Drafter(Protocol):
    """Batch first: one call serves every live request."""

    name: str

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft per request, of at most budgets[i] tokens (an empty one is allowed)."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Called once a round after verification, before the next `propose`."""

    def close(self, request: Request) -> None:
        """The request has ended: forget it."""


@dataclass(frozen=True)
class TakenStates:
    """The target's hidden states of the tokens at positions start, start + 1, … of a request's text.

    states  (n, taps · hidden) float32 on the target's device, as contract.Out.taken has them: a part of its forward's
            tensor, which stays as it is. Only of tokens that are in the text for good: pieces of the prompt, and what
            was accepted.
    """

    request: Request
    start: int
    states: Tensor

    def of(self, taps: Sequence[int], wanted: Sequence[int]) -> "TakenStates":
        """The states of some of the taps that these are of, in the order of `wanted`."""
        if list(taps) == list(wanted):
            return self
        streams = self.states.chunk(len(taps), dim=1)
        return replace(self, states=torch.cat([streams[taps.index(tap)] for tap in wanted], dim=1))


@runtime_checkable
class StateReader(Protocol):
    """What a drafter may offer besides its contract: it reads the target's hidden states as the text comes about.

    taps  of which places, as contract.TakesStates numbers them; (): it reads nothing.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The places."""

    def read(self, taken: Sequence[TakenStates]) -> None:
        """Called after each forward, before `observe`, for those of its requests that go on.

        The states of a request come in the order of its text, each once. Some never come: those of a prefix that was
        taken over from the cache, so that there may be none yet when it is drafted for, and those of rounds in which it
        was settled that nothing is drafted, though the last round before a draft is read in any case. A request that
        gave its place back (`close`) begins anew.
        """


@runtime_checkable
class WeighsRows(Protocol):
    """What a drafter may offer besides its contract: it ends a draft where no further token is worth its row.

    worth  below which probability a token that the text comes to is not; an engine that knows what rows take sets it.
    """

    worth: float


@dataclass(frozen=True)
class DeferredDrafts:
    """Chains of a model on the target's device, whose tokens the host reads once the target has verified them there.

    tokens  (n, most) int64 on the device, as DeviceRounds.draft returns them.
    counts  how many tokens are drafted for each of the requests that were asked for; rows are of those with any.
    """

    tokens: Tensor
    counts: list[int]

    @property
    def flat(self) -> Tensor:
        """(sum of counts,) the drafts' tokens one after the other."""
        drafted = [count for count in self.counts if count]
        if drafted == [self.tokens.shape[1]] * len(drafted):
            return self.tokens.flatten()
        return torch.cat([row[:count] for row, count in zip(self.tokens, drafted, strict=True)])


@runtime_checkable
class DeferredDrafter(Protocol):
    """What a drafter may offer besides its contract, for targets that are DeviceRounds on the same device."""

    def propose_deferred(
        self, requests: Sequence[Request], budgets: Sequence[int], device: torch.device
    ) -> DeferredDrafts | None:
        """Drafts without waiting for the tokens; None, with nothing changed, where this drafter cannot."""

    def settle(
        self, requests: Sequence[Request], deferred: DeferredDrafts, tokens: Sequence[Sequence[int]]
    ) -> list[Draft]:
        """One draft per request of the same call, now that the tokens of `deferred` are known.

        Raises UserError where the draft's logits were not finite.
        """


class EachText(Generic[Text]):
    """A drafter's records of the live texts by request; it learns from the texts alone, not from outcomes."""

    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the next `propose` reads the texts themselves."""

    def close(self, request: Request) -> None:
        self._texts.pop(request.id, None)


class CopyingDrafter(EachText[Text], ABC):
    """Proposes what stands in a text already: a chain for each request by itself, an empty one where it finds none."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See Drafter."""
        return [self.draft_one(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    @abstractmethod
    def draft_one(self, request: Request, budget: int) -> Draft:
        """A chain of at most `budget` tokens."""


class NoDrafter(EachText[None]):
    """Proposes nothing: plain decoding."""

    name = "none"

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """An empty draft each."""
        return [Draft() for _ in requests]
