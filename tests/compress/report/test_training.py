import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.training_words import training_findings, won_back

perplexity = st.floats(1.01, 1e4)


def said(**training: Any) -> tuple[str, ...]:
    return training_findings(training)


@given(perplexity, perplexity, st.floats(0, 1))
def test_the_share_won_back_is_of_the_log_perplexity(original: float, pruned: float, share: float) -> None:
    healed = pruned * math.exp(-share * (math.log(pruned) - math.log(original)))
    found = won_back(original, pruned, healed)
    if pruned <= original:
        assert found is None
    elif pruned > 1.001 * original:
        assert found == pytest.approx(share, abs=1e-6)


def test_what_healing_did_is_said_and_what_it_did_not() -> None:
    def healed(pruned: float, healed: float) -> str:
        [sentence] = said(heal={"perplexity": {"original": 10.0, "pruned": pruned, "healed": healed}})
        return sentence

    assert "from 10.00 to 40.00" in healed(40.0, 20.0) and "wins back 50 %" in healed(40.0, 20.0)
    assert healed(40.0, 41.0).endswith("it has NOT helped.")
    assert healed(9.0, 8.0).endswith("brought it to 8.00.")


def test_what_a_draft_learnt_is_said() -> None:
    def learnt(**after: float | None) -> str:
        before = {"acceptance_rate": 0.5, "agreement": 0.6}
        [sentence] = said(draft={"acceptance": {"before": before, "after": before | after}})
        return sentence

    better = learnt(acceptance_rate=0.5625, agreement=0.6875)
    assert "0.500 to 0.562" in better and "0.600 to 0.688" in better and "NOT" not in better
    assert "NOT helped" in learnt(agreement=0.6)
    assert "nothing was drafted greedily" in learnt(acceptance_rate=None, agreement=0.7)


def test_what_heads_gain_is_said() -> None:
    def gained(before: float | None, after: float | None) -> str:
        [sentence] = said(
            medusa={"heads": 2, "tree": [[0], [1], [0, 0]], "tokens_per_round": {"before": before, "after": after}}
        )
        return sentence

    assert "tree of 3 nodes the 2 Medusa heads gain 1.90 tokens a round" in gained(1.1, 1.9)
    assert "could not be measured" in gained(None, 1.9)


def test_stages_that_say_theirs_elsewhere_add_nothing() -> None:
    assert said() == () == said(ternary={"warning": "Rounding ruins.", "perplexity": {"original": 1.0}})
