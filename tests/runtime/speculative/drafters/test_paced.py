"""Copied drafts follow what was accepted lately; to fix γ, or to draft by a model, changes nothing of that."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime import Speculator
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Outcome, Request
from runtime.speculative.draft_length import LONGEST
from runtime.speculative.drafters.fallback import ChainedDrafter, ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.paced import PacedDrafter, paced

Fake = Callable[..., Any]
LOOP = [7, 8, 9] * 20


def request(id_: int = 0) -> Request:
    return Request(id_, list(LOOP), len(LOOP), Sampling(), 500)


def lengths(drafter: Any, one: Request, accepted: list[int | None], budget: int = 64) -> list[int]:
    """Of each round's draft; None: all of it is accepted."""
    found = []
    for count in accepted:
        [draft] = drafter.propose([one], [budget])
        found.append(len(draft.tokens))
        length = len(draft.tokens) if count is None else count
        drafter.observe([Outcome(one, list(range(length)), length)])
    return found


def test_a_draft_is_twice_as_long_as_one_accepted_whole_and_else_one_longer_than_what_was() -> None:
    drafter = paced(LookupDrafter())
    assert isinstance(drafter, PacedDrafter) and drafter.name == "lookup"
    assert lengths(drafter, request(), [None, None, 3, None, 0, None]) == [2, 4, 8, 4, 8, 1]
    assert lengths(paced(LookupDrafter()), request(), [None] * 6)[-2:] == [LONGEST, LONGEST]


def test_a_budget_bounds_it_and_a_round_without_a_draft_says_nothing() -> None:
    drafter, one = paced(LookupDrafter()), request()
    assert lengths(drafter, one, [None, None], budget=3) == [2, 3]
    assert lengths(drafter, one, [0], budget=0) == [0]
    assert lengths(drafter, one, [None]) == [8]


def test_each_text_has_its_own_and_an_ended_one_is_forgotten() -> None:
    drafter, one, other = paced(LookupDrafter()), request(), request(1)
    lengths(drafter, one, [None, None])
    assert lengths(drafter, other, [None]) == [2] and lengths(drafter, one, [None]) == [8]
    drafter.close(one)
    assert lengths(drafter, one, [None]) == [2] and lengths(drafter, other, [None]) == [4]


def test_only_what_copies_is_paced(fake: Fake) -> None:
    model = ModelDrafter(fake(0))
    chain = paced(ChainedDrafter([LookupDrafter(), model]))
    assert paced(model) is model and isinstance(chain, ChainedDrafter) and chain.name == "lookup+model"
    assert isinstance(chain.drafters[0], PacedDrafter) and chain.drafters[1] is model


def test_what_chains_share_they_share_paced(fake: Fake) -> None:
    lookup, model = LookupDrafter(), ModelDrafter(fake(0))
    chosen = paced(ChosenDrafter([model, ChainedDrafter([lookup, model]), lookup]))
    assert isinstance(chosen, ChosenDrafter) and chosen.each == (model, chosen.drafters[2])
    one = request()
    assert lengths(chosen.drafters[2], one, [None, None]) == [2, 4]
    assert lengths(chosen.drafters[1], one, [None]) == [8]


@pytest.mark.parametrize("gamma", [5, None])
def test_a_fixed_draft_length_is_drafted_as_it_is(fake: Fake, gamma: int | None) -> None:
    target = fake(0)
    [plain] = Speculator(target).generate([LOOP], 60, stop=())
    [found] = Speculator(target, LookupDrafter(), gamma).generate([LOOP], 60, stop=())
    assert found.tokens == plain.tokens
    drafted = [length for length, rounds in enumerate(found.metrics.draft_lengths) if rounds and length]
    # Near the text's end there is less room.
    assert (max(drafted) == 5) if gamma is not None else (min(drafted) <= 2)
