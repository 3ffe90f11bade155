"""What is known of several drafters: how much others' texts count in one, what rounds take, and what looks may cost."""

import numpy as np
import pytest

from runtime.speculative.by_drafter import Cost, Gain, Phase, Taken, Usual

NAMES = ("model", "lookup")


def seen(between: float, seed: int = 0, texts: int = 80, rounds: int = 60) -> Usual:
    """What is known after texts whose means scatter so far around 3, and their rounds by 1.5 around those."""
    rng, usual = np.random.default_rng(seed), Usual.of(NAMES)
    phase = usual.phases[False]
    for _ in range(texts):
        own, mean = {name: Gain() for name in NAMES}, rng.normal(3, between)
        for _ in range(rounds // 6):
            tokens = [max(1, round(rng.normal(mean, 1.5))) for _ in range(6)]
            phase.gained(own["model"], "model", tokens, 6 * 5)
        phase.end(own)
    return usual


def prior(phase: Phase, own: Gain) -> float:
    return phase.spreads["model"].prior(own, phase.of_round("model")[0])


def test_what_others_gained_counts_the_more_the_less_texts_differ() -> None:
    alike, differing = seen(0.0).phases[False], seen(1.5).phases[False]
    assert prior(alike, Gain()) > 20 > 6 > prior(differing, Gain())
    assert prior(Usual.of(NAMES).phases[False], Gain()) == 5  # of whom nothing is known
    # A text of quite another kind is not taken for one of theirs; one like them is.
    other, like = Gain(), Gain()
    other.add(20 * 9, 20 * 5, 20, 1.0)
    like.add(20 * 3, 20 * 5, 20, 1.0)
    assert prior(alike, other) == 0 and prior(alike, like) > 15


def test_expected_is_between_the_text_s_own_rounds_and_those_of_others() -> None:
    usual = seen(1.0)
    usual.costs["model"].add([Taken(3, 5, 0.2, 1.0)] * 10, asking=True)
    usual.took(1, [Taken(3, 5, 0.2, 1.0), Taken(1, 1, 0.0, 0.5)])
    tokens, rows = usual.phases[False].of_round("model")
    assert rows == pytest.approx(5) and tokens == pytest.approx(3, abs=0.5)
    found = usual.expected({}, False, 1)
    assert found["model"].tokens == tokens and found["model"].seconds == pytest.approx(1.2)
    assert found["model"].rate == pytest.approx(tokens / 1.2) and 0 < found["model"].doubt < 0.1
    assert found["lookup"].rate == 0  # never timed
    own = Gain()
    own.add(10 * 4, 10 * 3, 10, 1.0)
    mixed = usual.expected({"model": own}, False, 1)["model"]
    assert tokens < mixed.tokens < 4 and mixed.tokens > 3 and 0.8 < mixed.seconds < 1.2
    assert mixed.doubt > found["model"].doubt
    assert usual.expected({}, True, 1) == found  # of texts that repeat themselves nothing else is known
    assert usual.expected({}, False, 7)["model"].seconds == found["model"].seconds  # the nearest batch that was


def test_few_rounds_of_texts_that_repeat_themselves_count_little_but_for_copies() -> None:
    usual = Usual.of(NAMES, copying=("lookup",))
    for name in NAMES:
        usual.costs[name].add([Taken(3, 5, 0.2, 1.0)] * 10, asking=True)
        usual.phases[False].gained(Gain(), name, [3] * 400, 400 * 5)
        usual.phases[True].gained(Gain(), name, [9] * 4, 4 * 10)
    usual.took(1, [Taken(3, 5, 0.2, 1.0)])
    found = usual.expected({}, True, 1)
    assert 3 < found["model"].tokens < 4.5 and found["lookup"].tokens == pytest.approx(9)
    usual.phases[True].gained(Gain(), "model", [9] * 400, 400 * 10)
    assert 8 < usual.expected({}, True, 1)["model"].tokens < 9  # many are told more of
    assert usual.expected({}, False, 1)["model"].tokens == pytest.approx(3)


@pytest.mark.parametrize("together", [1, 7])
def test_what_drafting_takes_follows_what_it_lately_took(together: int) -> None:
    rng, cost = np.random.default_rng(1), Cost()

    def rounds(seconds: float, count: int) -> None:
        for _ in range(count // together):
            taken = [Taken(1, 1, seconds * rng.lognormal(0, 0.1), 1.0, asking=9.0) for _ in range(together)]
            cost.add(taken, asking=False)

    rounds(0.5, 14)
    assert cost.drafting == pytest.approx(0.5, rel=0.1)
    rounds(0.2, 280)
    assert cost.drafting == pytest.approx(0.2, rel=0.1) and cost.rounds == 294
    cost.add([Taken(1, 1, 1e6, 1.0)], asking=False)  # the machine was elsewhere
    assert cost.drafting < 0.5
    cost.add([Taken(1, 1, 0.2, 1.0, asking=1.0)] * 280, asking=True)
    assert cost.drafting == pytest.approx(1.2, rel=0.1)


def test_looks_may_cost_some_rounds_at_first_and_then_a_small_share() -> None:
    left = []
    for rounds in (16, 128, 1024, 100_000):
        usual = Usual.of(NAMES)
        usual.rounds, usual.seconds = rounds, 0.01 * rounds
        left.append(usual.left_for_looks / usual.seconds)
    assert 0.3 > left[0] > left[1] > left[2] > left[3] and left[1] < 0.05 and left[3] < 0.005
    usual.looking = 10.0
    assert usual.left_for_looks < 0
