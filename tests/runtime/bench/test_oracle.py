"""The oracle: it is right as often as it says, and its draft really runs."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime import Speculator
from runtime.bench.oracle import OracleDrafter
from runtime.engine.metrics import total
from runtime.errors import UserError

Fake = Callable[..., Any]
PROMPTS = [[i, 7, 2 * i + 1] for i in range(20)]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_it_is_right_as_often_as_it_says(fake: Fake, acceptance: float) -> None:
    target, draft = fake(0), fake(1)
    plain = Speculator(target).generate(PROMPTS, 60)
    known = {tuple(prompt): result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)}
    results = Speculator(target, OracleDrafter(draft, known, acceptance), draft_length=4).generate(PROMPTS, 60)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    counts = total([result.metrics for result in results])
    # Of each depth: accepted among those whose predecessors were.
    before, tries, hits = counts.rounds, 0, 0
    for drafted, accepted in zip(counts.drafted_at, counts.accepted_at, strict=True):
        tries += min(before, drafted)
        hits += accepted
        before = accepted
    assert hits / tries == pytest.approx(acceptance, abs=0.05)
    # A forward for each token of the longest draft of a round; the last rounds of a text draft fewer.
    assert len(draft.decoder.widths) > 3 * max(result.metrics.rounds for result in results)
    assert not draft.decoder.caches[-1].slots


def test_another_prompt_gets_the_drafts_own_tokens(fake: Fake) -> None:
    target = fake(0)
    oracle = OracleDrafter(fake(0, noise=0.3), {(1, 2): [5] * 50}, 1.0)
    [result] = Speculator(target, oracle, draft_length=4).generate([[3, 4]], 40)
    assert result.tokens == Speculator(target).generate([[3, 4]], 40)[0].tokens
    assert 0 < result.metrics.accepted < result.metrics.drafted


def test_an_acceptance_that_is_none(fake: Fake) -> None:
    with pytest.raises(UserError, match=r"from 0 to 1, but is 1\.5"):
        OracleDrafter(fake(0), {}, 1.5)
