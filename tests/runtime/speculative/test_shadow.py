"""Drafts that nobody verifies: what of them was right is what the text shows, and what a round would have accepted."""

from itertools import count

import numpy as np
import pytest

from runtime.sampling.params import Sampling
from runtime.speculative.draft import CopyingDrafter, Draft, Request
from runtime.speculative.draft_length import LONGEST
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.shadow import Shadow


class Recording(LookupDrafter):
    """Keeps its drafts, and where they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, list[int]]] = []

    def draft_one(self, request: Request, budget: int) -> Draft:
        draft = super().draft_one(request, budget)
        self.made.append((len(request.tokens), list(draft.tokens)))
        return draft


def a_text(rng: np.random.Generator, length: int) -> list[int]:
    """Random tokens of few kinds, with stretches that come again."""
    tokens = [int(token) for token in rng.integers(0, 6, 20)]
    while len(tokens) < length:
        if rng.random() < 0.3:
            start = int(rng.integers(0, len(tokens) - 5))
            tokens += tokens[start : start + int(rng.integers(3, 40))]
        else:
            tokens += [int(token) for token in rng.integers(0, 6, 3)]
    return tokens[:length]


@pytest.mark.parametrize("seed", range(5))
def test_what_was_right_is_what_the_text_has(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text, drafter, shadow = a_text(rng, 1500), Recording(), Shadow()
    request = Request(0, text[:20], 20, Sampling(), 1480)
    found: list[int] = []
    number = 0
    while len(request.tokens) < len(text):
        if (right := shadow.round(request, drafter, number)) is not None:
            found.append(right)
            _, drafted = drafter.made[-1]
            assert shadow.rows == (1 + min(right + 1, len(drafted)) if drafted else 1)
        # Nobody has to ask in the rounds between.
        number = max(number + 1, shadow.due) if rng.random() < 0.5 else number + 1
        done = len(request.tokens)
        request.tokens += text[done : done + int(rng.integers(1, 7))]
    expected = []
    for at, tokens in drafter.made:
        right = 0
        while right < len(tokens) and at + right < len(text) and tokens[right] == text[at + right]:
            right += 1
        expected.append(right)
    # The last one may not have been settled. Of those that go well the first tokens are enough, so that they are told
    # of before the rest has come.
    assert len(expected) - len(found) <= 1 and len(found) > 40 and 0 in found
    clear = [(one, whole) for one, whole in zip(found, expected, strict=False) if one != whole]
    assert all(6 <= one < whole for one, whole in clear) and clear and max(found) <= LONGEST


def test_texts_that_copies_fit_are_watched_more_often() -> None:
    def drafts(right: bool) -> int:
        drafter, shadow = Recording(), Shadow()
        request = Request(0, [1, 2, 3, 4] * 3, 12, Sampling(), 1000)
        for number in range(200):
            shadow.round(request, drafter, number)
            request.tokens.append(request.tokens[-4] if right else number % 2)
        return len(drafter.made)

    assert 200 / 8 < drafts(right=True) < 200 / 6 + 2
    rng, drafter, shadow = np.random.default_rng(0), Recording(), Shadow()
    request = Request(0, [int(token) for token in rng.integers(0, 5, 40)], 40, Sampling(), 1000)
    for number in range(200):
        shadow.round(request, drafter, number)
        request.tokens.append(100 + number)  # what never was before: nothing is found
    assert 200 / 6 < len(drafter.made) < 200 / 4


@pytest.mark.parametrize("seed", range(3))
def test_rounds_between_wrong_drafts_are_told_of(seed: int) -> None:
    """With them the mean is near that of rounds that lookup itself drafts, and without them far above it."""
    rng = np.random.default_rng(seed)
    text: list[int] = [int(token) for token in rng.integers(0, 200, 60)]
    while len(text) < 6000:  # copies now and then, and else what seldom was before
        start = int(rng.integers(0, len(text) - 30))
        text += text[start : start + int(rng.integers(8, 30))]
        text += [int(token) for token in rng.integers(0, 200, int(rng.integers(20, 120)))]

    def request() -> Request:
        return Request(0, text[:60], 60, Sampling(), len(text))

    own, drafter, rounds = request(), LookupDrafter(), 0
    while len(own.tokens) < len(text) - LONGEST:
        draft, at = drafter.draft_one(own, LONGEST), len(own.tokens)
        right = next((i for i, token in enumerate(draft.tokens) if token != text[at + i]), len(draft.tokens))
        own.tokens += text[at : at + right + 1]
        rounds += 1
    alone = (len(own.tokens) - 60) / rounds
    watched, drafter, shadow = request(), LookupDrafter(), Shadow()
    found: list[tuple[int, int]] = []
    for number in count():
        if len(watched.tokens) >= len(text) - LONGEST:
            break
        if (more := shadow.round(watched, drafter, number)) is not None:
            found.append((1 + more, shadow.passed))
        watched.tokens += text[len(watched.tokens) : len(watched.tokens) + int(rng.integers(1, 5))]
    tokens, passed = sum(one for one, _ in found), sum(one for _, one in found)
    assert (tokens + passed) / (len(found) + passed) == pytest.approx(alone, rel=0.12)
    assert tokens / len(found) > 1.3 * alone
    # What its drafter wrote itself meanwhile is nobody's round.
    shadow.forget()
    shadow.round(watched, Same(), shadow.due)
    assert shadow.passed == 0


class Same(CopyingDrafter[None]):
    """Always says that token 0 comes next."""

    name = "same"

    def draft_one(self, request: Request, budget: int) -> Draft:
        return Draft.chain([0] * budget)


def test_a_token_is_right_as_often_as_it_is_drawn() -> None:
    """So that what is watched is what drafting would have been: chi-squared on one degree of freedom, at 0.1 %."""
    rng, p, shadow = np.random.default_rng(3), 0.35, Shadow()
    right: list[int] = []
    request = Request(0, [1], 1, Sampling(temperature=1.0), 10**6)
    for number in count():
        if len(right) == 4000:
            break
        if (found := shadow.round(request, Same(), number)) is not None:
            right.append(found)
        request.tokens += [0 if rng.random() < p else 1 for _ in range(int(rng.integers(1, 4)))]
    first = sum(count > 0 for count in right)
    assert (first - p * 4000) ** 2 / (4000 * p * (1 - p)) < 10.8
    assert np.mean(right) == pytest.approx(p / (1 - p), rel=0.08)
