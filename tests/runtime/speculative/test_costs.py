"""What forwards of some widths cost, before a controller has seen any."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import load
from runtime.engine.drafting import Drafters
from runtime.serve.engines import opened
from runtime.serve.settings import ModelSettings
from runtime.speculative.costs import first_costs
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.lookup import LookupDrafter


def test_first_costs_are_over_one_row(tiny: Callable[..., Path]) -> None:
    model = load(tiny("llama"), threads=1)
    found = first_costs(model, [5, 6, 7, 8])
    assert list(found) == [1, 2, 3, 5] and found[1] == 1 and all(cost > 0 for cost in found.values())


def test_a_server_begins_with_them(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its drafters; one that is told γ asks for none."""
    given: list[Controller | int] = []
    usual = Drafters.__init__

    def noted(self: Drafters, drafters: object, draft_length: Controller | int, lenient: bool = False) -> None:
        given.append(draft_length)
        usual(self, drafters, draft_length, lenient)  # type: ignore[arg-type]

    monkeypatch.setattr(Drafters, "__init__", noted)
    for length in (None, 3):
        settings = ModelSettings("m", str(tiny("llama")), drafter="lookup", draft_length=length, threads=1)
        opened(settings)
    first, fixed = given
    assert isinstance(first, Controller) and list(first.widths) == [1, 2, 3, 5] and fixed == 3


def test_a_further_drafter_of_an_engine_begins_with_them_too() -> None:
    first = Controller(widths={1: 1.0, 2: 1.5})
    drafters = Drafters({"lookup": LookupDrafter(), "other": LookupDrafter()}, first)
    other = drafters.named("other").controller
    assert other is not None and other is not first and other.widths == first.widths
