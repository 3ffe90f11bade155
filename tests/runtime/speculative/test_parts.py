"""A chain's later drafters get as long drafts as pay, none where none do, and are looked at again."""

import numpy as np
import pytest

from runtime.speculative.draft import Draft, Request
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.measured import Drafted, Round, Times
from runtime.speculative.parts import Parts
from tests.runtime.speculative.simulation import bent, per_token
from tests.runtime.speculative.test_worth import Weighs


def chain(controller: Controller, rounds: int, p: float, step: float, seed: int = 0) -> tuple[float, list[int]]:
    """Tokens per second, and how long the drafts of the second drafter were in the rounds in which it was asked.

    The first one finds something in two rounds of five, for nothing, nine tenths of it right; the second takes `step`
    for each token, of which each is right with probability p.
    """
    rng, tokens, seconds, second = np.random.default_rng(seed), 0, 0.0, []
    for _ in range(rounds):
        gamma = 0 if controller.resting(1) else controller.next_budget(1, 1000).budget
        found = rng.random() < 0.4
        length = min(gamma, 16 if found else controller.limits.get(2, 16))
        accepted = per_token(0.9 if found else p)(length, rng)
        asked = 2 if not found and length else 1
        draft = rng.lognormal(0, 0.05) * (0.01 + (step * length if asked == 2 else 0.0))
        target = rng.lognormal(0, 0.05) * bent(1 + length)
        if controller.resting(1):
            controller.rested(target)
        else:
            drafts = (Drafted(length, accepted, number=asked),) if gamma else ()
            controller.observe(Round(1, gamma, drafts, 1 + length, draft, target, asked=asked))
        tokens, seconds = tokens + 1 + accepted, seconds + draft + target
        second += [length] if asked == 2 else []
    return tokens / seconds, second


def best_of(p: float, step: float) -> float:
    """What the best fixed lengths of both gain, by what is expected."""

    def round_(share: float, length: int, right: float, took: float) -> tuple[float, float]:
        gained = sum(right**depth for depth in range(length + 1))
        return share * gained, share * (0.01 + bent(1 + length) + took * length)

    found = []
    for first in range(17):
        for second in range(first + 1):
            a, b = round_(0.4, first, 0.9, 0.0), round_(0.6, second, p, step)
            found.append((a[0] + b[0]) / (a[1] + b[1]))
    return max(found)


@pytest.mark.parametrize(("p", "step", "pays"), [(0.3, 0.5, False), (0.0, 0.1, False), (0.8, 0.1, True)])
def test_whoever_is_asked_second_drafts_as_long_as_pays(p: float, step: float, pays: bool) -> None:
    controller = Controller()
    gained = [chain(controller, 1200, p, step, seed) for seed in range(3)]
    assert np.mean([rate for rate, _ in gained[1:]]) > 0.93 * best_of(p, step)
    later = gained[1][1] + gained[2][1]
    # One that does not pay is asked now and then, with drafts that tell something.
    assert len(later) > 1000 if pays else 2 <= len(later) < 100
    assert pays or max(later) <= 4
    assert pays == (np.median(later) in range(2, 9) and controller.limits[2] > 0)


def test_one_that_becomes_good_is_asked_again() -> None:
    controller = Controller()
    for seed in range(2):
        chain(controller, 1500, 0.0, 0.1, seed)
    assert controller.limits[2] in (0, 4)
    for seed in range(5):
        _, second = chain(controller, 1500, 0.9, 0.05, seed)
    assert len(second) > 600


class Long(Weighs):
    """Proposes as many tokens as it may."""

    def propose(self, requests: list[Request], budgets: list[int]) -> list[Draft]:  # type: ignore[override]
        return [Draft.chain([1] * budget) for budget in budgets]


def test_a_chain_keeps_to_its_limits() -> None:
    chained, request = ChainedDrafter([Weighs(), Long()]), Request(0, [1], 1, None, 9)  # type: ignore[arg-type]
    lengths = []
    for limit in (None, 3, 0):
        chained.limits = {} if limit is None else {2: limit}
        (draft,) = chained.propose([request], [5])
        lengths.append((len(draft.tokens), chained.asked))
    assert lengths == [(5, 2), (3, 2), (0, 1)]


def test_each_part_has_its_own_limit_and_number() -> None:
    chained, request = ChainedDrafter([Weighs(), Weighs(), Long()]), Request(0, [1], 1, None, 9)  # type: ignore[arg-type]
    chained.limits = {2: 0, 3: 4}
    (draft,) = chained.propose([request], [6])
    assert (len(draft.tokens), draft.number, chained.asked, draft.is_chain) == (4, 3, 3, True)


def test_a_limit_is_of_its_own_drafter_s_drafts_where_others_of_the_round_have_longer_ones() -> None:
    times, rng = Times(), np.random.default_rng(3)
    parts, alone = Parts(times), Parts(times)
    for count in range(1, 9):
        for rows, seconds in ((count, bent(count)), (count + 12, bent(count + 12))):
            times.add_target(rows, seconds)
    times.add_drafting(1, 12, 0.3, 0.3, asked=2)
    for _ in range(40):
        # Lookup's copies are right; of the other's only the first may be, in one draft of three.
        own = [Drafted(int(rng.integers(1, 4)), int(rng.random() < 0.3), number=2) for _ in range(2)]
        parts.add([Round(3, 12, [own[0], Drafted(12, 12), own[1]], 20, 0.1, 1.0, asked=2)])
        alone.add([Round(3, 12, own, 8, 0.1, 1.0, asked=2)])
        parts.choose(1, 12, 1.5, 100.0)
        chosen = times.limits.pop(2, None)
        alone.choose(1, 12, 1.5, 100.0)
        assert times.limits.pop(2, None) == chosen
    assert chosen is not None and chosen <= 2
    # A limit of one token, and a draft of twelve beside it: as CI once met it.
    times.limits[2] = 1
    parts.add([Round(3, 12, [Drafted(1, 0, number=2), Drafted(12, 3), Drafted(1, 1, number=2)], 17, 0.1, 1.0, asked=2)])
