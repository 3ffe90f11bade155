"""Check of sampling: texts of the known model, asked for with many seeds, and the tests that are made of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.audit.asks import Answer, Ask, Budget, Engine
from runtime.audit.directions import directions
from runtime.audit.known import LETTERS, Array, KnownModel
from runtime.audit.statistics import (
    Bools,
    Ints,
    dependence_test,
    event_test,
    sum_test,
    token_test,
    uniforms,
)

# Requests of one chunk share a prompt and a batch; their seeds follow each other.
CHUNK = 32
# One short, one long that repeats itself (for drafters that look a text up), one in between.
PROMPTS = ("abct", "pqrsabcdpqrsabcdefpqrsabcdpqrsabcdef", "tkkl")
# What no rounding makes of a distribution: tokens of less probability accuse by themselves.
_IMPOSSIBLE = 1e-9
_DEEPEST = 6
# Tests that most biases fail; the others look for one kind each.
_BROAD = ("tokens of probability 0", "all tokens", "after equal texts", "surprisal")
_TOWARDS = "towards "
_LAGS, _SHIFTS = (1, 2, 3, 4), (-2, -1, 0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """How tokens are sampled. No two parameters at once whose order engines disagree on."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        return ", ".join(parts)


SETTINGS = (Setting(), Setting(0.6), Setting(top_k=2), Setting(top_p=0.8))


@dataclass(frozen=True)
class Known:
    """Target and draft of the known model."""

    target: KnownModel
    draft: KnownModel


@dataclass(frozen=True)
class Samples:
    """Texts and what they were drawn from; R requests of T tokens each.

    tokens  (R, T) numbers of letters. probs  (R, T, 21) their exact distributions. counted  (R, T): there, and sure.
    drafted (R, T, 21) the draft's distributions.
    chunks  (R,) of requests that follow each other. prompts  (R,) their prompts' numbers.
    """

    tokens: Ints
    probs: Array
    counted: Bools
    drafted: Array
    chunks: Ints
    prompts: Ints

    def half(self, number: int) -> "Samples":
        """The requests of every other round of chunks."""
        kept = self.chunks // len(PROMPTS) % 2 == number
        return Samples(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


def asks(known: Known, setting: Setting, count: int, new_tokens: int, first_seed: int, drafts: bool) -> list[Ask]:
    """`count` requests, chunk by chunk; each has the seed after the one before it."""
    found = []
    for number in range(count):
        text = PROMPTS[number // CHUNK % len(PROMPTS)]
        prompt = tuple(known.target.encode(text))
        found.append(
            Ask(
                prompt, text, new_tokens, setting.temperature, setting.top_k, setting.top_p, first_seed + number, drafts
            )
        )
    return found


def gather(
    engine: Engine, known: Known, setting: Setting, asked: Sequence[Ask], budget: Budget, together: bool = True
) -> Samples:
    """As many of the asked texts as the budget allows, with their distributions."""
    answers = budget.ask(engine, asked, together, CHUNK)
    count, length = len(answers), asked[0].new_tokens if asked else 1
    tokens = np.zeros((count, length), dtype=np.int64)
    there = np.zeros((count, length), dtype=bool)
    letters = len(LETTERS)
    probs, drafted = (np.full((count, length, letters + 1), 1 / (letters + 1)) for _ in range(2))
    chunks = np.arange(count) // CHUNK
    for row, answer in enumerate(answers):
        numbers = letters_of(known.target, answer)[:length]
        tokens[row, : len(numbers)], there[row, : len(numbers)] = numbers, True
    sure = np.zeros_like(there)
    for place, text in enumerate(PROMPTS):
        rows = np.flatnonzero(chunks % len(PROMPTS) == place)
        if not len(rows):
            continue
        ids = np.array([*known.target.letters, known.target.other])[tokens[rows]]
        prompt = tuple(known.target.encode(text))
        ways = (setting.temperature, setting.top_k, setting.top_p)
        probs[rows], sure[rows] = known.target.probabilities(known.target.next_logits(prompt, ids), *ways)
        drafted[rows], _ = known.draft.probabilities(known.draft.next_logits(prompt, ids), *ways)
    # A token that no sampling gives says nothing of what follows; it is an accusation of its own.
    return Samples(tokens, probs, there & sure, drafted, chunks, chunks % len(PROMPTS))


def letters_of(model: KnownModel, answer: Answer) -> list[int]:
    """An answer's tokens as numbers of letters, from its ids or else from its text."""
    return model.numbers(list(answer.tokens) if answer.tokens is not None else model.encode(answer.text))


def p_values(samples: Samples, seed: int) -> dict[str, float]:
    """Every test that there is enough of, by its name. `seed` of the random points in tokens' intervals."""
    return {name: p for name, p in _tests(samples, seed) if p is not None}


def is_broad(test: str) -> bool:
    """Whether most biases fail a test."""
    return test in _BROAD or test.startswith(_TOWARDS)


def _tests(s: Samples, seed: int) -> Iterator[tuple[str, float | None]]:
    counted, length = s.counted, s.tokens.shape[1]
    own = np.take_along_axis(s.probs, s.tokens[..., None], axis=-1)[..., 0]
    never = counted & (own < _IMPOSSIBLE)
    yield "tokens of probability 0", 0.0 if never.any() else 1.0
    # What is certain tells nothing, and its neighbours' p-values would be spoilt by what is impossible.
    counted = counted & ~never
    yield "all tokens", token_test(s.tokens[counted], s.probs[counted])
    for place in range(length):
        rows = counted[:, place]
        yield f"position {place + 1}", token_test(s.tokens[rows, place], s.probs[rows, place])
    yield "after equal texts", _by_context(s, counted)
    before, after = s.tokens[:, :-1], s.tokens[:, 1:]
    for letter, name in enumerate(LETTERS):
        rows = counted[:, 1:] & (before == letter)
        yield f"after {name!r}", token_test(after[rows], s.probs[:, 1:][rows])
    with np.errstate(divide="ignore"):
        surprisal = np.where(s.probs > 0, -np.log(s.probs), 0.0)
    yield "surprisal", _mean_test(surprisal[counted], s.tokens[counted], s.probs[counted])
    tokens, probs = s.tokens[counted], s.probs[counted]
    for name, wrong in directions(probs, s.drafted[counted]).items():
        # Bounded: a token that is never sampled would outweigh all others.
        excess = np.clip(np.where(probs > 0, wrong / np.maximum(probs, 1e-300) - 1, 0.0), -1.0, 10.0)
        yield _TOWARDS + name, _mean_test(excess, tokens, probs)
    yield from _repeats(s, counted)
    for ranked in (False, True):
        yield from _dependence(s, counted, uniforms(s.tokens, s.probs, seed, ranked), " by rank" * ranked)
    yield "equal texts of different seeds", _equal_texts(s, own, counted)


def _by_context(s: Samples, counted: Bools) -> float | None:
    """Tokens after the same prompt and the same tokens: biases whose signs differ by context do not cancel there."""
    groups, rows, places, first = [], [], [], 0
    for place in range(min(_DEEPEST, s.tokens.shape[1])):
        texts = np.concatenate([s.prompts[:, None], s.tokens[:, :place]], axis=1)
        numbers = np.unique(texts, axis=0, return_inverse=True)[1].reshape(-1)
        here = np.flatnonzero(counted[:, : place + 1].all(axis=1))
        groups.append(numbers[here] + first)
        rows.append(here)
        places.append(np.full(len(here), place))
        first += len(texts)
    at = np.concatenate(rows), np.concatenate(places)
    return token_test(s.tokens[at], s.probs[at], np.concatenate(groups))


def _mean_test(values: Array, tokens: Ints, probs: Array) -> float | None:
    """Of a function (n, C) of the token: its sum over (n,) tokens."""
    means = (probs * values).sum(axis=-1)
    variances = (probs * values**2).sum(axis=-1) - means**2
    return sum_test(values[np.arange(len(tokens)), tokens], means, variances)


def _repeats(s: Samples, counted: Bools) -> Iterator[tuple[str, float | None]]:
    """Whether a token comes again, in its own text and in the next request's, as often as it should."""
    for lag in _LAGS:
        rows = counted[:, lag:]
        chance = np.take_along_axis(s.probs[:, lag:], s.tokens[:, :-lag, None], axis=-1)[..., 0]
        yield f"the token {lag} before again", event_test((s.tokens[:, lag:] == s.tokens[:, :-lag])[rows], chance[rows])
    for shift in _SHIFTS:
        here, there, apart = _neighbours(s, shift)
        rows = counted[1:, here] & apart
        chance = np.take_along_axis(s.probs[1:, here], s.tokens[:-1, there, None], axis=-1)[..., 0]
        same = s.tokens[1:, here] == s.tokens[:-1, there]
        yield f"the last request's token {_at(shift)}", event_test(same[rows], chance[rows])


def _dependence(s: Samples, counted: Bools, u: Array, kind: str) -> Iterator[tuple[str, float | None]]:
    """Whether noise comes again: in neighbouring tokens, and in requests whose seeds are neighbours."""
    for lag in _LAGS[:2]:
        rows = counted[:, lag:] & counted[:, :-lag]
        yield f"noise {lag} before{kind}", dependence_test(u[:, :-lag][rows], u[:, lag:][rows])
    for shift in _SHIFTS:
        here, there, apart = _neighbours(s, shift)
        rows = counted[1:, here] & counted[:-1, there] & apart
        yield f"the last request's noise {_at(shift)}{kind}", dependence_test(u[:-1, there][rows], u[1:, here][rows])


def _neighbours(s: Samples, shift: int) -> tuple[slice, slice, Bools]:
    """Positions of a request, those of the request before it, and (R − 1, 1) where both are of a chunk."""
    length = s.tokens.shape[1]
    here, there = slice(max(0, -shift), length - max(0, shift)), slice(max(0, shift), length + min(0, shift))
    apart = (s.chunks[1:] == s.chunks[:-1])[:, None]
    return here, there, apart


def _at(shift: int) -> str:
    return "at the same position" if shift == 0 else f"{abs(shift)} {'later' if shift > 0 else 'earlier'}"


def _equal_texts(s: Samples, own: Array, counted: Bools) -> float | None:
    """Whole texts that come twice: at most so many are expected (Markov's inequality)."""
    whole = counted.all(axis=1)
    texts = np.concatenate([s.prompts[whole, None], s.tokens[whole]], axis=1)
    if len(texts) < 2:
        return None
    twice = len(np.unique(texts, axis=0)) < len(texts)
    return min(1.0, len(texts) * float(own[whole].prod(axis=1).sum())) if twice else 1.0
