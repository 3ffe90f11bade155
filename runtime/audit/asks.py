"""What an audited engine is asked, and what it answers: the protocol of Python callables, and what HTTP is mapped to.

A callable is `def engine(asks: Sequence[Ask]) -> Sequence[Mapping]`. All asks of one call are one batch. Each answer
holds `tokens` (ids) or `text`, and may hold `logprobs` (natural logarithms, one a token, of the model's distribution at
temperature 1). `ask.drafts` says whether the engine is to speculate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from time import monotonic
from typing import Any, Protocol

from runtime.errors import UserError


@dataclass(frozen=True)
class Ask:
    """One text: tokens to continue, how many to add, and how.

    prompt       token ids; empty where only `text` is known (an HTTP engine's own model).
    text         the same prompt as text.
    temperature  0: greedy.
    top_k        0: off. top_p  1: off.
    seed         of the sampling; texts of different seeds are to be independent.
    drafts       whether to speculate.
    logprobs     whether the log-probabilities of the tokens are wanted.
    """

    prompt: tuple[int, ...]
    text: str
    new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    drafts: bool = True
    logprobs: bool = False


@dataclass(frozen=True)
class Answer:
    """The new part of a text: its tokens, or None where the engine gives text only; log-probabilities, or nothing."""

    tokens: tuple[int, ...] | None
    text: str
    logprobs: tuple[float, ...] = ()

    @property
    def parts(self) -> tuple[int, ...] | tuple[str, ...]:
        """What two answers are compared by: tokens, else characters."""
        return self.tokens if self.tokens is not None else tuple(self.text)


class Engine(Protocol):
    """An engine under audit.

    name       as the report calls it.
    has_plain  whether the same engine can be asked without drafts.
    """

    name: str
    has_plain: bool

    def ask(self, asks: Sequence[Ask], together: bool) -> list[Answer]:
        """The answers; at once (`together`), or one after the other. Raises UserError for an engine that does not."""


@dataclass
class Budget:
    """How much may be asked: requests left, and the clock. Shared by all checks of an audit."""

    requests: int
    seconds: float
    started: float = field(default_factory=monotonic)

    @property
    def spent(self) -> bool:
        """Whether nothing more may be asked."""
        return self.requests <= 0 or monotonic() - self.started >= self.seconds

    def ask(self, engine: Engine, asks: Sequence[Ask], together: bool = True, batch: int = 32) -> list[Answer]:
        """As many answers as the budget allows, in the order of the asks."""
        found: list[Answer] = []
        while len(found) < len(asks) and not self.spent:
            part = asks[len(found) : len(found) + min(batch, self.requests)]
            found += engine.ask(part, together)
            self.requests -= len(part)
        return found


@dataclass(frozen=True)
class CallableEngine:
    """A Python function as an engine."""

    name: str
    function: Callable[[Sequence[Ask]], Sequence[Mapping[str, Any]]]
    has_plain: bool = True

    def ask(self, asks: Sequence[Ask], together: bool) -> list[Answer]:
        """Calls the function once, or once for each ask. Raises UserError for answers that are none."""
        groups = [asks] if together else [[one] for one in asks]
        found: list[Answer] = []
        for group in groups:
            answers = self.function(group)
            if not isinstance(answers, Sequence) or len(answers) != len(group):
                raise UserError(f"{self.name} must return a list of {len(group)} answers, one for each ask")
            found += [_answer(self.name, one) for one in answers]
        return found


def import_engine(said: str, has_plain: bool = True) -> CallableEngine:
    """The engine of `package.module:function`. Raises UserError where there is none."""
    module, _, name = said.partition(":")
    try:
        found = getattr(import_module(module), name, None) if module and name else None
    except ImportError as error:
        raise UserError(f"--callable {said}: {error}; name it as package.module:function") from error
    if not callable(found):
        raise UserError(f"--callable {said}: no such function; name it as package.module:function")
    return CallableEngine(said, found, has_plain)


def _answer(name: str, said: object) -> Answer:
    if not isinstance(said, Mapping) or not ("tokens" in said or "text" in said):
        raise UserError(f"{name} must answer with tokens or text, found {type(said).__name__} without either")
    tokens, text, logprobs = said.get("tokens"), said.get("text", ""), said.get("logprobs") or ()
    if tokens is not None:
        tokens = tuple(int(token) for token in tokens)
    if not all(isinstance(one, (int, float)) and not math.isnan(one) for one in logprobs):
        raise UserError(f"{name} answered with logprobs that are no numbers")
    return Answer(tokens, str(text), tuple(map(float, logprobs)))
