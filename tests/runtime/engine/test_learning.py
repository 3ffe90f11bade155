"""What controllers are told of rounds: what drafts took, without what choosing their γ took."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runtime import Model, load
from runtime.engine import metrics
from runtime.engine.engine import Engine
from runtime.sampling.params import Sampling
from runtime.speculative.by_drafter import Taken
from runtime.speculative.choice import Choice
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.fallback import ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.measured import Round
from runtime.speculative.settled import DraftBudget


@pytest.fixture(scope="module")
def target(tiny_packed: Callable[..., Path]) -> Model:
    return load(tiny_packed("int8"))


@pytest.mark.parametrize("together", [1, 3])
def test_choosing_is_not_drafting(target: Model, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, told = [0.0], list[Round]()

    def now(_: metrics.Clock) -> float:
        seconds[0] += 1e-3
        return seconds[0]

    class Slow(Controller):
        def next_budget(self, batch: int, missing: int, alone: bool = True, unread: int = 1) -> DraftBudget:
            seconds[0] += 100.0
            return DraftBudget(min(3, missing), batch)

        def observe(self, found: Round) -> None:
            told.append(found)

    class Timed(LookupDrafter):
        def draft_one(self, request: Request, budget: int) -> Draft:
            seconds[0] += 2.0
            return super().draft_one(request, budget)

    monkeypatch.setattr(metrics.Clock, "now", now)
    prompts = ["a = 1\na = 1\na = 1\na =", "import os\n" * 3, "x = x = x ="][:together]
    engine = Engine(target.decoder, Timed(), Slow(), "coupled", target.decoder.new_cache(), max_batch=together)
    for number, prompt in enumerate(prompts):
        tokens = target.tokenizer.encode(prompt)
        engine.add(Request(number, tokens, len(tokens), Sampling(), 20), metrics.Metrics())
    while engine.busy:
        engine.step()
    drafted = [one for one in told if one.budget > 0]
    assert len(drafted) > 3
    for one in drafted:
        assert 2.0 * len(one.drafts) <= one.draft_seconds < 2.0 * one.batch + 1
    assert all(one.target_seconds < 1 for one in drafted)


def test_a_round_that_rests_is_told_to_its_controller_alone(target: Model) -> None:
    rested, observed, heard = list[float](), list[Round](), list[int]()

    class Rests(Controller):
        rests = True

        def resting(self, batch: int) -> bool:
            return self.rests

        def rested(self, seconds: float) -> None:
            rested.append(seconds)

        def next_budget(self, batch: int, missing: int, alone: bool = True, unread: int = 1) -> DraftBudget:
            return DraftBudget(min(2, missing), batch)

        def observe(self, found: Round) -> None:
            observed.append(found)

    class Hears(LookupDrafter):
        def observe(self, outcomes: Sequence[Outcome]) -> None:
            heard.append(len(outcomes))

    controller = Rests()
    engine = Engine(target.decoder, Hears(), controller, "coupled", target.decoder.new_cache())
    for number in range(2):
        tokens = target.tokenizer.encode("x = x = x =")
        engine.add(Request(number, tokens, len(tokens), Sampling(), 40), metrics.Metrics())
        controller.rests = number > 0
        engine.step()  # reads the prompt: of that no controller is told, whether it rests or not
        assert len(rested) + len(observed) == 6 * number
        for told in range(1, 7):
            controller.rests = told % 3 != 0
            engine.step()
            assert len(rested) + len(observed) == 6 * number + told
    assert min(rested) > 0 and len(rested) == 8 and [one.budget for one in observed] == [2] * 4
    # The drafter hears of the rounds that were not rests: the first prompt's among them.
    assert heard == [1, 1, 1, 2, 2]


def test_settling_a_round_counts_in_the_next_one_of_the_text(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, told = [0.0], list[list[Taken]]()

    class Stopped(metrics.Clock):
        def now(self) -> float:
            return seconds[0]

    class Settles(metrics.Metrics):
        @property
        def arrivals(self) -> list[list[float]]:
            seconds[0] += 2.0
            return self.__dict__.setdefault("_arrivals", [[]])

        @arrivals.setter
        def arrivals(self, given: list[list[float]]) -> None:
            self.__dict__["_arrivals"] = given

    monkeypatch.setattr(Choice, "observe", lambda choice, text, taken: told[-1].append(taken))
    chosen = ChosenDrafter([LookupDrafter(), ModelDrafter(target)])
    engine = Engine(target.decoder, chosen, Controller(), "coupled", target.decoder.new_cache(), clock=Stopped())
    for number in range(2):
        told.append([])
        tokens = target.tokenizer.encode("x = x = x =")
        engine.add(Request(number, tokens, len(tokens), Sampling(), 20), Settles())
        while engine.busy:
            engine.step()
    # The clock moves only where a round is settled, the first of a text, which reads its prompt and is not told, too.
    # What follows a text's last round is no other text's.
    for rounds in told:
        assert len(rounds) > 2 and all(one.rest == 2.0 for one in rounds)
