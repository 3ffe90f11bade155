"""Planted bugs are found, and the same sampler without them is not accused."""

import pytest

from runtime.audit.asks import Budget, CallableEngine
from runtime.audit.report import SamplingRow
from runtime.audit.run import Plan, audit, sample
from runtime.audit.sampled import Known, Setting
from tests.runtime.audit.engines import Sampler
from tests.runtime.audit.planted import BUGS

# One of each kind: shared noise, wrong residual, off by one.
QUICK = ("SharedWithAcceptance", "SharedByRequests", "ResidualOfTarget", "AcceptsByNextRow")


def accused(known: Known, kind: type[Sampler], seed: int, plan: Plan) -> list[SamplingRow]:
    engine = CallableEngine(kind.__name__, kind(known, seed), has_plain=False)
    rows = sample(engine, known, plan, Budget(plan.requests, plan.seconds), lambda said: None)
    return [row for row in rows if row.accused]


@pytest.mark.parametrize("name", QUICK)
def test_bugs_are_found_in_few_requests(known: Known, name: str) -> None:
    plan = Plan(requests=288, settings=(Setting(),), new_tokens=16)
    assert accused(known, BUGS[name], 3, plan)
    assert not accused(known, Sampler, 3, plan)


def test_whose_fault_it_is_is_told(known: Known) -> None:
    """Drafts that change the distribution, and an engine that does not sample as asked at all."""
    plan = Plan(requests=360, settings=(Setting(),), new_tokens=16, greedy_tokens=8, repeats=1)
    found = audit(CallableEngine("planted", BUGS["ResidualAbsolute"](known)), known, plan)
    assert found.verdict == "differs" and "not without drafts" in found.sentence
    hot = audit(CallableEngine("hot", Hot(known)), known, plan)
    assert hot.verdict == "differs" and "without drafts too" in hot.sentence


class Hot(Sampler):
    """Samples at twice the temperature, with and without drafts."""

    def probs(self, model: object, logits: object) -> object:
        return super().probs(model, logits / 2 if self.ways[0] else logits)  # type: ignore


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_every_bug_is_found(known: Known, name: str) -> None:
    """Twenty times of twenty for each of the three kinds that engines have had; thrice for every other one."""
    for seed in range(20 if name in QUICK else 3):
        plan = Plan(requests=1600, seed=5000 * seed + 1)
        assert accused(known, BUGS[name], 100 + seed, plan), seed
