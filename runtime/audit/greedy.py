"""Check of greedy texts: with and without drafts, alone and together with others, and repeated: equal, or where not."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.audit.asks import Answer, Ask, Budget, Engine
from runtime.audit.known import LETTERS, KnownModel
from runtime.audit.sampled import letters_of

# Two logits nearer than this may change places where an engine rounds.
TIE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The first difference of two texts: which prompt, after how many tokens (or characters), and what stands there.

    gap  between the two largest logits there, in float64 (the known model's only).
    """

    prompt: int
    place: int
    expected: str
    found: str
    gap: float | None = None


@dataclass(frozen=True)
class Way:
    """Texts made in one way: how many were equal to the reference, and the first that was not."""

    name: str
    drafts: bool
    together: bool
    texts: int
    equal: int
    first: Difference | None


@dataclass(frozen=True)
class GreedyResult:
    """`reference`: what all ways were compared with; "" where there was nothing."""

    reference: str
    ways: list[Way] = field(default_factory=list)


def check(
    engine: Engine, asked: Sequence[Ask], budget: Budget, repeats: int = 2, known: KnownModel | None = None
) -> GreedyResult:
    """Compares every way of getting a prompt's greedy text with plain decoding of the prompt alone.

    Without plain decoding the reference is float64's text (the known model's; ties within TIE count as equal), or the
    engine's own first text, which shows only whether it says the same again.
    """
    expected: list[Answer] = []
    reference = "its own first texts with drafts"
    if engine.has_plain:
        expected = budget.ask(engine, [replace(one, drafts=False) for one in asked], together=False)
        reference = "its texts without drafts, each alone"
    elif known is not None:
        expected = [Answer(tuple(greedy_tokens(known, one)), "") for one in asked]
        reference = "greedy texts in float64"
    ways = []
    for drafts in (False, True):
        for together in (False, True):
            if not drafts and not engine.has_plain:
                continue
            found: list[Answer] = []
            # The reference itself was the first run of plain decoding alone.
            for _ in range(repeats - int(not drafts and not together)):
                found += budget.ask(engine, [replace(one, drafts=drafts) for one in asked], together)
            if not expected:
                expected = found[: len(asked)]
            name = f"{'with' if drafts else 'without'} drafts, {'together' if together else 'alone'}"
            against = _Reference(asked, expected, known, known is not None and not engine.has_plain)
            ways.append(_compared(name, drafts, together, found, against))
    return GreedyResult(reference, [way for way in ways if way.texts])


def greedy_tokens(model: KnownModel, ask: Ask) -> list[int]:
    """Greedy decoding in float64."""
    cache = model.cache(1, len(ask.prompt) + ask.new_tokens)
    tokens, text = np.array([ask.prompt]), list[int]()
    start = 0
    while len(text) < ask.new_tokens:
        best = int(model.extend(cache, tokens, np.array([start]))[0, -1, :-1].argmax())
        start += tokens.shape[1]
        text.append(model.letters[best])
        tokens = np.array([[text[-1]]])
    return text


@dataclass(frozen=True)
class _Reference:
    """What texts are compared with. `lenient`: float64's ties count as equal."""

    asked: Sequence[Ask]
    expected: Sequence[Answer]
    known: KnownModel | None
    lenient: bool


def _compared(name: str, drafts: bool, together: bool, found: Sequence[Answer], with_: _Reference) -> Way:
    equal, first = 0, None
    for number, answer in enumerate(found):
        place = number % len(with_.asked)
        if place >= len(with_.expected):
            continue
        difference = _difference(place, answer, with_)
        if difference is None or (with_.lenient and difference.gap is not None and difference.gap < TIE):
            equal += 1
        else:
            first = first or difference
    return Way(name, drafts, together, len(found), equal, first)


def _difference(number: int, found: Answer, with_: _Reference) -> Difference | None:
    expected, names = with_.expected[number], None
    one: Sequence[int | str] = expected.parts
    other: Sequence[int | str] = found.parts
    if with_.known is not None:
        one, other = (letters_of(with_.known, answer) for answer in (expected, found))
        names = [*LETTERS, "another token"]
    elif expected.tokens is None or found.tokens is None:
        one, other = expected.text, found.text
    if list(one) == list(other):
        return None
    differing = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    place = next(differing, min(len(one), len(other)))
    here, there = (_shown(text, place, names) for text in (one, other))
    gap = None
    if with_.known is not None:
        gap = _gap(with_.known, with_.asked[number], [int(token) for token in one[:place]])
    return Difference(number, place, here, there, gap)


def _shown(text: Sequence[int | str], place: int, names: list[str] | None) -> str:
    if place >= len(text):
        return "the end"
    return repr(names[int(text[place])]) if names else repr(text[place])


def _gap(model: KnownModel, ask: Ask, before: Sequence[int]) -> float:
    ids = [*ask.prompt, *(model.letters[one] if one < len(LETTERS) else model.other for one in before)]
    row = np.sort(model.logits(np.array([ids]))[0, -1, :-1])
    return float(row[-1] - row[-2])
