"""A controller tells what a row is worth, and the drafter that weighs rows is told so."""

from collections.abc import Sequence

import pytest

from runtime.engine.round import Proposer
from runtime.speculative.draft import Draft, NoDrafter, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.measured import Drafted, Round
from runtime.speculative.spending import worth


class Weighs(NoDrafter):
    """Drafts nothing, and would weigh rows."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = 0.03

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in requests]


def learned(row: float) -> float:
    """What a controller finds a row worth after rounds in which each row took so much of the first one's time."""
    controller = Controller(8)
    for _ in range(60):
        budget = controller.next_budget(1, 500).budget
        accepted = min(budget, 3)
        drafts = (Drafted(budget, accepted),) if budget else ()
        controller.observe(Round(1, budget, drafts, 1 + budget, 1e-4, 1e-3 * (1 + row * budget)))
    assert controller.worth is not None
    return controller.worth


def test_dear_rows_are_worth_more() -> None:
    cheap, dear = learned(0.02), learned(0.3)
    assert cheap < 0.15 < dear
    assert worth(0.5, 5, 2.0) == pytest.approx(0.2) and worth(-1.0, 5, 2.0) == 0.0


def test_parts_of_a_chain_that_weigh_rows_are_found() -> None:
    weighs = Weighs()
    assert Proposer("one", weighs).weighing == [weighs]
    assert Proposer("both", ChainedDrafter([LookupDrafter(), weighs])).weighing == [weighs]
    assert Proposer("none", LookupDrafter()).weighing == []
