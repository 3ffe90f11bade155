"""What controllers are told of rounds: what drafts took, without what choosing their γ took."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Model, load
from runtime.engine import metrics
from runtime.engine.engine import Engine
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.lookup import LookupDrafter
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
