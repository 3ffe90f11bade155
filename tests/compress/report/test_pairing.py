"""Who is timed, who wins, and what the table says of the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from compress.report import pairing
from compress.report.pairing import ORIGINAL, WORTH, Contest, Drafting, compete, finalists
from compress.report.schema_speed import PLAIN
from compress.report.timing import Timed, Work
from runtime import load
from runtime.engine.metrics import Metrics
from runtime.errors import UserError
from tests.compress.packed_models import write_packed

WORK = Work([[5, 80, 41, 7], [9, 9, 10, 11]], 8)


def timed(seconds: float, tokens: int = 10, drafted: int = 6, accepted: int = 4) -> Timed:
    """One prompt, once: so many tokens in so many seconds."""
    counts = Metrics(requests=1, rounds=tokens - accepted, gained=tokens, seconds=seconds, arrivals=[[0.1] * tokens])
    counts.drafted_at, counts.accepted_at = [drafted], [accepted]
    counts.draft_lengths = [tokens - accepted - drafted, drafted]
    counts.draft_seconds, counts.target_seconds = 0.1 * seconds, 0.9 * seconds
    return Timed([[list(range(tokens))]], [[counts]])


PLAINLY = timed(1.0, drafted=0, accepted=0)


def contest(**seconds: float) -> Contest:
    return Contest({}, {ORIGINAL: timed(2.0), PLAIN: PLAINLY, **{name: timed(s) for name, s in seconds.items()}})


def test_the_fastest_wins_where_it_beats_plain_decoding_by_the_margin() -> None:
    assert contest(lookup=0.9, suffix=0.8).winner == "suffix"
    tie = contest(lookup=1 / (WORTH - 0.005), suffix=1.2)
    assert (tie.fastest, tie.winner) == ("lookup", PLAIN)
    assert contest().winner == PLAIN and contest().fastest is None


def test_who_is_faster_without_drafts_is_so_by_chance() -> None:
    ways = {ORIGINAL: timed(2.0), PLAIN: PLAINLY, "lookup": timed(0.8, drafted=0, accepted=0), "suffix": timed(1.1)}
    found = Contest({}, ways)
    assert (found.fastest, found.winner) == ("suffix", PLAIN)
    assert [row.drafter for row in found.rows({})] == [PLAIN, "lookup", "suffix"]


def test_the_table_has_everybody_and_the_winner_first() -> None:
    ways = {ORIGINAL: timed(2.0), PLAIN: PLAINLY, "suffix": timed(0.5), "lookup": timed(0.8)}
    found = Contest({}, ways, {PLAIN: timed(0.1), "tree": timed(0.2)}, {"nested": "no int8 layers"})
    rows = found.rows({2: 1.5})
    assert [(row.drafter, row.measured) for row in rows] == [
        ("suffix", "all prompts"),
        ("lookup", "all prompts"),
        (PLAIN, "all prompts"),
        ("tree", "trial"),
        ("nested", None),
    ]
    suffix, lookup, plain, tree, nested = rows
    assert (suffix.speedup, lookup.speedup, plain.speedup, tree.speedup) == (2.0, 1.25, 1.0, 0.5)
    assert suffix.acceptance_rate == pytest.approx(4 / 6) and suffix.tokens_per_round == pytest.approx(10 / 6)
    assert suffix.draft_length == 1.0 and suffix.mismatches == 0 and suffix.tokens_compared == 10
    # c: 0.05 s over 6 tokens, of a plain step of 0.09 s; every forward was 2 wide.
    assert suffix.predicted_speedup == pytest.approx((10 / 6) / (0.05 / 6 / 0.09 + 1.5))
    assert plain.draft_length is plain.tokens_compared is plain.predicted_speedup is None
    assert "trial" in str(tree.why) and nested.why == "no int8 layers" and nested.tokens_per_second is None


def test_of_each_prompt_the_median_repeat_counts() -> None:
    one = Timed()
    for seconds in ((1.0, 2.0), (9.0, 2.2), (1.2, 30.0)):
        one.metrics.append([Metrics(seconds=s, arrivals=[[0.0] * 17]) for s in seconds])
        one.tokens.append([[1] * 17, [2] * 17])
    assert one.seconds == pytest.approx(1.2 + 2.2) and one.tokens_per_second == pytest.approx(34 / 3.4)
    assert one.only([1]).seconds == pytest.approx(2.2)


def test_the_prediction_is_of_the_repeats_whose_times_count() -> None:
    trying, dropped = timed(1.5), timed(1.0, drafted=0, accepted=0)
    ways = {ORIGINAL: timed(2.0), PLAIN: Timed(PLAINLY.tokens * 3, PLAINLY.metrics * 3)}
    for repeats in ((trying, dropped, dropped), (dropped, trying, trying)):
        one = Timed([r.tokens[0] for r in repeats], [r.metrics[0] for r in repeats])
        row = next(row for row in Contest({}, {**ways, "lookup": one}).rows({2: 1.5}) if row.drafter == "lookup")
        assert row.acceptance_rate == pytest.approx(4 / 6)
        # Of the ten rounds without a draft a tenth went for looking for one, of a plain step of 0.09 s.
        drafted = repeats[1] is trying
        assert row.tokens_per_round == pytest.approx(10 / 6 if drafted else 1.0)
        assert row.draft_length == pytest.approx(1.0 if drafted else 0.0)
        cost, width = (0.15 / 6 / 0.09, 1.5) if drafted else (0.01 / 0.09, 1.0)
        assert row.predicted_speedup == pytest.approx((10 / 6 if drafted else 1.0) / (cost + width))


def test_finalists_are_near_the_fastest_and_fit_into_the_time() -> None:
    work = Work([[1]] * 10, 10, repeats=1, seconds=10.0)  # 100 tokens each
    rates = {PLAIN: 100.0, "lookup": 150.0, "suffix": 140.0, "tree": 100.0}
    assert finalists(rates, work) == ["lookup", "suffix"]
    assert finalists({PLAIN: 100.0, "tree": 20.0}, work) == ["tree"]
    slow = {name: rate / 30 for name, rate in rates.items()}
    assert finalists(slow, work) == ["lookup"]


def test_where_time_is_short_a_trial_chooses(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny("llama"))
    monkeypatch.setattr(pairing, "_enough_time", lambda *_: False)
    monkeypatch.setattr(pairing, "finalists", lambda rates, work: [name for name in rates if name != PLAIN][:1])
    stages = []
    names = ("lookup", "suffix", "nested")
    found = compete(model, Drafting(model), names, None, WORK, lambda stage, *_: stages.append(stage))
    assert set(stages) == {"trial", "speed"}
    assert set(found.timed) == {ORIGINAL, PLAIN, "lookup"} and set(found.trial) == {PLAIN, "suffix"}
    assert "int8" in found.refused["nested"]
    assert [len(row) for row in (found.timed["lookup"].metrics[0], found.trial["suffix"].metrics[0])] == [2, 2]
    assert {row.drafter for row in found.rows({})} == {PLAIN, "lookup", "suffix", "nested"}


def test_what_a_run_can_draft_with(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = load(tiny("llama"))
    assert Drafting(model).names == ("lookup", "suffix")
    every = ("lookup", "suffix", "model", "lookup+model", "suffix+model", "tree", "medusa", "lookup+medusa", "nested")
    assert Drafting(model, model, Path("heads"), planes=True).names == every
    int8 = load(write_packed(tiny("llama"), tmp_path / "int8", "int8"))
    nested = Drafting(int8, planes=True).speculator("nested", 2)
    assert nested.drafter.name == "nested" and nested.target is not int8
    [ours], [plain] = (one.generate([[5, 80, 41]], 8, stop=()) for one in (nested, pairing.Speculator(int8)))
    assert ours.tokens == plain.tokens


def test_trees_need_a_decoder_that_verifies_them(tiny: Callable[..., Path]) -> None:
    model = load(tiny("gpt2"))
    with pytest.raises(UserError, match="no trees"):
        Drafting(model, model).speculator("tree", None)
    with pytest.raises(UserError, match="no trees"):
        compete(model, Drafting(model, model), ("tree",), None, WORK, lambda *_: None)
