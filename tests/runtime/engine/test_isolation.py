"""What fails for one request ends that one alone: the others write what they would, and nothing leaks."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import Model, Speculator, load
from runtime.contract import Out
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics
from runtime.engine.requests import RequestOptions, finish_reason, make_request
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.fallback import ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.tree import TreeDrafter

Fake = Callable[..., Any]
POISON = 299


def requests(count: int, new: int = 20, **options: Any) -> list[Request]:
    rng = np.random.default_rng(2)
    samplings = [Sampling(**options), Sampling(temperature=0.8, seed=5, **options)]
    return [
        Request(i, prompt, len(prompt), samplings[i % 2], new)
        for i in range(count)
        for prompt in [rng.integers(0, 290, 8).tolist()]
    ]


def alone(target: Any, one: Request) -> list[int]:
    prompt = one.tokens[: one.prompt_length]
    return Speculator(target).generate([prompt], one.max_new_tokens, one.sampling, stop=())[0].tokens


def run(engine: Engine, these: Sequence[Request]) -> list[Metrics]:
    metrics = [Metrics() for _ in these]
    for one, measured in zip(these, metrics, strict=True):
        engine.add(one, measured)
    ended = []
    for _ in range(10_000):
        if not engine.busy:
            break
        ended += [one.id for one in engine.step() if one.finished]
    assert sorted(ended) == sorted(one.id for one in these)  # each is told of once
    return metrics


def poisoned(target: Any, value: float = float("nan")) -> Any:
    """The same model, whose logits are no numbers after the token POISON."""
    law = target.decoder.law
    target.decoder.law = lambda context: law(context) * (value if POISON in context[-1:] else 1.0)
    return target


@pytest.mark.parametrize("draft", ["lookup", "model", "tree"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(fake: Fake, draft: str, value: float) -> None:
    target, small = poisoned(fake(0), value), fake(0, noise=0.5)
    drafter = {"lookup": LookupDrafter(), "model": ModelDrafter(small), "tree": TreeDrafter(small)}[draft]
    these = requests(6)
    for one in these[2:4]:
        one.tokens[-1] = POISON
    engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache(), lenient=True)
    run(engine, these)
    for i, one in enumerate(these):
        if i in (2, 3):
            assert isinstance(one.error, UserError) and "target's logits must be finite" in str(one.error)
            assert finish_reason(one) == "error" and not one.new_tokens
        else:
            assert one.error is None and (POISON in one.tokens or one.new_tokens == alone(fake(0), one))
    assert not target.decoder.caches[-1].slots and not drafter._texts


def test_no_number_after_a_wrong_draft_is_nobodys_fault(fake: Fake) -> None:
    class Wrong(LookupDrafter):
        def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            return [Draft.chain([POISON] * min(budget, 2)) for budget in budgets]

    penalised = [Sampling(repetition_penalty=1.2), Sampling(temperature=1.0, repetition_penalty=1.2)]
    these = [*requests(4), *(Request(8 + i, [1, 2, 3], 3, one, 20) for i, one in enumerate(penalised))]
    for rule in ("coupled", "rejection"):
        target = poisoned(fake(0))
        copies = [Request(o.id, list(o.tokens), o.prompt_length, o.sampling, 20) for o in these]
        run(Engine(target.decoder, Wrong(), 4, rule, target.decoder.new_cache()), copies)  # type: ignore[arg-type]
        assert all(one.error is None and len(one.new_tokens) == 20 for one in copies)


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))


def test_a_forward_that_fails_for_one_request(pair: tuple[Model, Model]) -> None:
    """Each is run alone once, so that its text is known whose fault it was."""
    target, draft = pair

    class Picky:
        def __init__(self, decoder: Any) -> None:
            self.__dict__.update(vars(decoder))
            self.decoder, self.calls = decoder, itertools.count()

        def forward(self, tokens: Any, rows: Any, cache: Any, logits_at: Any = None) -> Out:
            if POISON in tokens.tolist():
                for handle in rows.request.unique().tolist():
                    cache.reserve(handle, int((rows.request == handle).sum()))
                raise RuntimeError("boom")
            return self.decoder.forward(tokens, rows, cache, logits_at)  # type: ignore[no-any-return]

    these = requests(5, new=80)
    these[1].tokens[3] = POISON
    cache, drafter = target.decoder.new_cache("float32", 9), ModelDrafter(draft)
    engine = Engine(Picky(target.decoder), drafter, 4, "coupled", cache)  # type: ignore[arg-type]
    run(engine, these)
    assert str(these[1].error) == "boom" and not these[1].new_tokens
    for one in (these[0], *these[2:]):
        assert one.new_tokens == alone(target, one) or POISON in one.new_tokens
    assert cache.pages_free == 9 and not drafter._texts


def test_no_pages(pair: tuple[Model, Model]) -> None:
    """Another engine holds the rest of the pages: who cannot go on ends, and the next one begins."""
    target, _ = pair
    cache = target.decoder.new_cache("float32", 4)
    hoarder = cache.open(128)
    cache.reserve(hoarder, 128)
    engine = Engine(target.decoder, LookupDrafter(), 4, "coupled", cache)
    these = requests(3, new=100)
    these[0].max_new_tokens = 110
    these[0].tokens += these[0].tokens * 9
    these[0].prompt_length = len(these[0].tokens)
    run(engine, these)
    assert "ran out of pages with one request left in it" in str(these[0].error)
    assert [one.new_tokens for one in these[1:]] == [alone(target, one) for one in these[1:]]
    assert cache.pages_free == 2


class Faulty(LookupDrafter):
    """Fails in one of its calls whenever the text of one request has come far enough."""

    def __init__(self, moment: str, victim: int) -> None:
        super().__init__()
        self.moment, self.victim = moment, victim

    def _hurts(self, request: Request) -> bool:
        return request.id == self.victim and len(request.new_tokens) > 5

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        if self.moment == "propose" and any(map(self._hurts, requests)):
            raise RuntimeError("boom")
        drafts = super().propose(requests, budgets)
        if self.moment == "unsound":
            drafts = [
                Draft.chain([10**6]) if self._hurts(one) and budget else draft
                for one, draft, budget in zip(requests, drafts, budgets, strict=True)
            ]
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        if self.moment == "observe" and any(self._hurts(outcome.request) for outcome in outcomes):
            raise RuntimeError("boom")

    def close(self, request: Request) -> None:
        super().close(request)
        if self.moment == "close" and request.id == self.victim:
            raise RuntimeError("boom")


@pytest.mark.parametrize("moment", ["propose", "unsound", "observe", "close"])
def test_a_drafter_that_fails_costs_speed_and_no_text(fake: Fake, moment: str) -> None:
    target, drafter = fake(0), Faulty(moment, 2)
    engine = Engine(target.decoder, drafter, 4, "coupled", target.decoder.new_cache(), lenient=True)
    these = requests(5)
    metrics = run(engine, these)
    assert [one.new_tokens for one in these] == [alone(fake(0), one) for one in these]
    assert sum(metrics[2].drafter_faults.values()) == 1
    if moment in ("propose", "unsound"):  # known to be this one's fault alone
        assert [sum(m.drafter_faults.values()) for m in metrics] == [0, 0, 1, 0, 0]
        assert these[2].drafter_fault is not None and these[0].drafter_fault is None
    assert not drafter._texts and not target.decoder.caches[-1].slots


def test_a_strict_engine_raises_what_its_drafter_raised(fake: Fake) -> None:
    target = fake(0)
    engine = Engine(target.decoder, Faulty("propose", 2), 4, "coupled", target.decoder.new_cache())
    for one in requests(5):
        engine.add(one, Metrics())
    with pytest.raises(RuntimeError, match="boom"):
        while engine.busy:
            engine.step()
    engine.close()
    assert not target.decoder.caches[-1].slots


def test_a_draft_model_of_no_numbers(fake: Fake) -> None:
    target, small = fake(0), fake(0, noise=0.3)
    law = small.decoder.law
    small.decoder.law = lambda context: law(context) * float("nan")
    engine = Engine(target.decoder, ModelDrafter(small), 4, "coupled", target.decoder.new_cache(), lenient=True)
    these = requests(3)
    metrics = run(engine, these)
    assert [one.new_tokens for one in these] == [alone(fake(0), one) for one in these]
    assert all("the draft's logits must be finite" in next(iter(m.drafter_faults)) for m in metrics)


def test_too_many_minimum_tokens_where_only_stop_tokens_can_follow(constant: Callable[..., Any]) -> None:
    target = constant(np.array([0.5, 0.5]))
    engine = Engine(target.decoder, LookupDrafter(), 4, "coupled", target.decoder.new_cache())
    bad = make_request(target, [1, 0], 9, Sampling(min_tokens=3), (0, 1), id=0)
    good = make_request(target, [1, 0], 9, Sampling(), (), RequestOptions(), id=1)
    run(engine, [bad, good])
    assert "min_tokens is 3" in str(bad.error) and len(good.new_tokens) == 9


def test_a_copier_that_fails_while_it_is_watched(fake: Fake) -> None:
    """Its texts go on without a drafter; in a strict engine it is raised."""

    class Breaks(LookupDrafter):
        calls = 0

        def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            return [super(Breaks, self).draft_one(*one) for one in zip(requests, budgets, strict=True)]

        def draft_one(self, request: Request, budget: int) -> Draft:
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("boom")
            return super().draft_one(request, budget)

    def engine(lenient: bool) -> tuple[Engine, Breaks]:
        target, drafter = fake(0), Breaks()
        chosen = ChosenDrafter([ModelDrafter(fake(0, noise=0.5)), drafter])
        cache = target.decoder.new_cache()
        return Engine(target.decoder, chosen, Controller(), "coupled", cache, lenient=lenient), drafter

    these = requests(4, new=60)
    running, drafter = engine(lenient=True)
    measured = run(running, these)
    assert drafter.calls > 3 and sum(one.drafter_faults["RuntimeError: boom"] for one in measured) > 0
    assert all(one.error is None and one.new_tokens == alone(fake(0), one) for one in these)
    with pytest.raises(RuntimeError, match="boom"):
        run(engine(lenient=False)[0], requests(4, new=60))
