"""The drafter that follows a request's own prediction."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.prediction import PredictionDrafter


def request(prediction: list[int], written: list[int]) -> Request:
    return Request(0, [1, 2, *written], 2, Sampling(), 99, prediction=tuple(prediction))


def test_it_follows_the_prediction_and_finds_its_way_back() -> None:
    drafter, one = PredictionDrafter(3), request([5, 6, 7, 8, 9, 5, 6, 1], [])

    def proposed(*written: int, budget: int = 3) -> list[int]:
        one.tokens += written
        [draft] = drafter.propose([one], [budget])
        return draft.tokens

    assert proposed() == [5, 6, 7] and proposed(5, 6) == [7, 8, 9]
    assert proposed(99) == []  # it is not there
    assert proposed(8) == [9, 5, 6]  # found again
    assert proposed(9, 5, 6, budget=5) == [1]  # on from there, to the prediction's end
    assert proposed(1) == []
    assert proposed(5, 6) == [7, 8, 9]  # nothing behind: from the first such place
    assert proposed(budget=0) == []
    drafter.close(one)
    assert not drafter._texts


def test_a_text_of_equal_stretches_goes_on_behind_the_last_place() -> None:
    drafter, one = PredictionDrafter(), request([1, 2, 3, 1, 2, 4], [1, 2, 3, 9, 1, 2])
    assert drafter.propose([one], [4]) == [Draft.chain([3, 1, 2, 4])]
    two = request([1, 2, 3, 1, 2, 4], [1, 2, 3])
    two.id = 1
    assert drafter.propose([two], [1]) == [Draft.chain([1])]
    two.tokens += [9, 1, 2]
    assert drafter.propose([two], [4]) == [Draft.chain([4])]


def test_without_a_prediction_nothing_is_drafted() -> None:
    assert PredictionDrafter().propose([request([], [5])], [4]) == [Draft()]
    with pytest.raises(ValueError, match="at least 1"):
        PredictionDrafter(0)


def test_a_right_prediction_saves_most_rounds_and_a_wrong_one_changes_nothing(fake: Callable[..., Any]) -> None:
    target = fake(0)
    [plain] = Speculator(target).generate([[5, 6, 7]], 40, stop=(), temperature=0.7, seed=3)
    edited = [*plain.tokens[:10], 1, 2, *plain.tokens[12:30]]
    speculator = Speculator(target, draft_length=8)
    for prediction, rounds in [(plain.tokens, 6), (edited, 16), (list(range(40)), 40)]:
        [result] = speculator.generate(
            [[5, 6, 7]],
            40,
            stop=(),
            temperature=0.7,
            seed=3,
            drafter="prediction",
            prediction=tuple(prediction),
        )
        assert result.tokens == plain.tokens
        assert result.metrics.rounds <= rounds
    assert result.metrics.rounds > 30
