from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.report import advice, speed, timing
from compress.report.not_measured import covers, null_paths
from compress.report.pairing import Drafting
from compress.report.schema_speed import Lossless, Speed
from runtime import load
from runtime.errors import UserError
from runtime.model.load import Model
from runtime.speculative.costs import measure_costs
from tests.conftest import write_medusa

PROMPTS = [[5, 80, 41, 7], [101, 33, 200], [9, 9, 10, 11, 60], [250, 3]]
NEW = 12


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> tuple[Model, Model]:
    return load(tiny("llama")), load(tiny("llama", seed=1))


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(1, 320, (3, 40), generator=torch.Generator().manual_seed(0))


def quiet(stage: str, done: int, total: int) -> None:
    assert stage in ("speed", "trial") and 0 <= done <= total


Measure = Callable[..., speed.SpeedResult]


@pytest.fixture(scope="module")
def measure(models: tuple[Model, Model], windows: torch.Tensor) -> Measure:
    """The target drafted for by one drafter, γ = 3, unless something else is asked for."""
    original, target = models

    def go(draft: Model | None, **options: Any) -> speed.SpeedResult:
        asked = {"drafter": "model", "draft_length": 3} | options
        new, prompts = asked.pop("new_tokens", NEW), asked.pop("prompts", PROMPTS)
        drafting = Drafting(target, draft, asked.pop("heads", None))
        return speed.measure(speed.Job(original, drafting, timing.Work(prompts, new), windows, **asked), quiet)

    return go


@pytest.fixture(scope="module")
def self_drafted(models: tuple[Model, Model], measure: Measure) -> speed.SpeedResult:
    """The draft is the target itself: everything is accepted, so every figure is known but the times."""
    return measure(models[1])


def explained(result: speed.SpeedResult) -> bool:
    nulls = [path for path in null_paths(result.speed.model_dump()) if path != "baselines"]
    paths = [f"speed.{path}" for path in nulls if not path.startswith("pairings.")]
    assert not any(path.startswith("speed.pairings.") for path in result.not_measured)
    paths += [f"lossless.{path}" for path in null_paths(result.lossless.model_dump(by_alias=True))]
    return all(any(covers(reason, path) for reason in result.not_measured) for path in paths)


def test_a_perfect_draft(self_drafted: speed.SpeedResult) -> None:
    found = self_drafted.speed
    Speed.model_validate(found.model_dump())
    assert explained(self_drafted)
    assert found.acceptance_rate == 1.0
    assert found.acceptance_rate_t1 == 1.0 and found.acceptance_rate_t1_verify == "coupled"
    assert found.teacher_forced_agreement == 1.0
    assert found.teacher_forced_agreement_t1 == pytest.approx(1.0, abs=1e-5)
    assert found.accepted_by_position == [1.0, 1.0, 1.0]
    # The first token comes from the prompt; 11 more in rounds of 4, 4 and 3.
    assert found.tokens_per_round == pytest.approx(11 / 3)
    # Where a busy machine lets plain decoding win, that is the headline.
    assert found.speculative.mean_width == pytest.approx(11 / 3 if found.pays else 1.0)
    assert found.original.mean_width == found.compressed.mean_width == 1.0
    # Rounds at a text's end have room for less.
    assert found.mean_draft_length == pytest.approx(8 / 3)
    gamma = found.mean_draft_length
    expected = (gamma + 1) / (gamma * found.draft_cost_ratio + found.width_cost_ratio)
    assert found.iid_speedup == pytest.approx(expected)
    assert (found.prompts, found.new_tokens, found.draft_length, found.fastest_drafter) == (4, NEW, 3, "model")


def test_lossless_counts_every_token(self_drafted: speed.SpeedResult) -> None:
    expected = Lossless(class_="exact", verify="greedy", tokens_compared=3 * 4 * NEW, mismatches=0)
    assert self_drafted.lossless == expected


def test_derived_figures_follow_from_measured_ones(self_drafted: speed.SpeedResult) -> None:
    found = self_drafted.speed
    tau, c, v, gamma = (
        found.tokens_per_round,
        found.draft_cost_ratio,
        found.width_cost_ratio,
        found.mean_draft_length,
    )
    assert found.predicted_speedup == pytest.approx(advice.predicted_speedup(tau, gamma, c, v))
    rates = {name: found.pace(name) for name in ("original", "compressed", "speculative")}
    assert found.speedup.over_compressed == pytest.approx(rates["speculative"] / rates["compressed"])
    assert found.speedup.over_original == pytest.approx(rates["speculative"] / rates["original"])
    costs = {entry.width: entry.ratio for entry in found.width_costs}
    assert costs[1] == 1.0 and set(costs) == {1, 2, 3, 4, 5, 9, 17}
    # Two rounds of 4 rows and one of 3.
    assert v == pytest.approx((2 * costs[4] + costs[3]) / 3)
    assert found.advice.band == advice.LONG


def test_the_headline_is_the_best_row_of_the_table(models: tuple[Model, Model], measure: Measure) -> None:
    result = measure(models[0], drafter=None, draft_length=None)
    found, rows = result.speed, result.speed.pairings
    names = {"none", "lookup", "suffix", "model", "lookup+model", "suffix+model", "tree"}
    assert {row.drafter for row in rows} == names and len(rows) == len(names)
    assert found.drafter == rows[0].drafter and found.speculative.tokens_per_second == rows[0].tokens_per_second
    assert found.speedup.over_compressed == pytest.approx(rows[0].speedup)
    assert found.pays == (rows[0].drafter != "none") and found.speedup.over_compressed >= 1.0
    plain = next(row for row in rows if row.drafter == "none")
    assert plain.speedup == 1.0 and plain.tokens_per_second == found.compressed.tokens_per_second
    assert result.lossless.mismatches == 0 == sum(row.mismatches or 0 for row in rows)
    assert result.lossless.tokens_compared == 6 * found.repeats * 4 * NEW
    assert found.fastest_drafter in names - {"none"} and found.teacher_forced_agreement is not None
    assert (found.advice is None or bool(found.advice.draft_length) == found.pays) and explained(result)


def test_where_nobody_is_to_draft_plain_decoding_is_the_headline(measure: Measure) -> None:
    result = measure(None, drafter="none", draft_length=None)
    found = result.speed
    assert [row.drafter for row in found.pairings] == ["none"] == [found.drafter]
    assert found.speculative == found.compressed and found.speedup.over_compressed == 1.0
    assert found.acceptance_rate is None and "--drafter none" in result.not_measured["speed.acceptance_rate"]
    assert result.lossless.class_ is None and explained(result)


def test_a_bad_draft_is_accepted_less(models: tuple[Model, Model], measure: Measure) -> None:
    result = measure(models[0])
    found = result.speed
    assert found.acceptance_rate < 0.5 and found.teacher_forced_agreement < 0.5
    assert found.acceptance_rate == pytest.approx(sum(found.accepted_by_position) / 3, abs=0.2)
    assert result.lossless.mismatches == 0
    assert [group.prompts for group in found.groups] == [2, 2]
    assert found.groups[0].repeated_4gram_share <= found.groups[1].repeated_4gram_share
    tasks = measure(models[0], groups=("math", "rag", "math", "math")).speed.groups
    assert [(group.name, group.prompts) for group in tasks] == [("math", 3), ("rag", 1)]


def test_without_a_draft_the_text_drafts(measure: Measure) -> None:
    result = measure(None, drafter=None)
    assert {row.drafter for row in result.speed.pairings} == {"none", "lookup", "suffix"}
    assert result.speed.teacher_forced_agreement is None
    assert "no draft model" in result.not_measured["speed.teacher_forced_agreement"]
    # How much it costs is the machine's affair; that it was timed is not.
    assert result.speed.draft_cost_ratio is None or result.speed.draft_cost_ratio > 0
    assert explained(result)


def test_heads_draft_a_tree_and_have_no_figures_of_a_chain(
    models: tuple[Model, Model], measure: Measure, tmp_path: Path
) -> None:
    heads = write_medusa(models[1].path, tmp_path / "medusa", scale=0.02)
    result = measure(None, drafter="medusa", draft_length=5, heads=heads)
    found = result.speed
    Speed.model_validate(found.model_dump())
    assert found.fastest_drafter == "medusa" and found.predicted_speedup > 0
    assert found.iid_speedup is None and found.advice is not None
    assert "tree" in result.not_measured["speed.iid_speedup"]
    # By depth: at most one of a round's nodes at a depth is accepted, and none without its parent.
    reached = found.accepted_by_position
    assert reached == sorted(reached, reverse=True) and sum(reached) == pytest.approx(found.tokens_per_round - 1)
    assert result.lossless.mismatches == 0
    assert explained(result)


def test_a_text_of_one_token_leaves_nulls_with_reasons(models: tuple[Model, Model], measure: Measure) -> None:
    result = measure(models[1], prompts=PROMPTS[:1], new_tokens=1)
    assert result.speed.acceptance_rate is None and result.speed.original.itl_ms.p50 is None
    assert explained(result)
    Speed.model_validate(result.speed.model_dump())


def test_a_target_that_cannot_roll_back_is_not_speculated_with(
    models: tuple[Model, Model], measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "the cache of Recurrent cannot be rolled back"
    monkeypatch.setattr(type(models[1].decoder), "no_drafts", why, raising=False)
    result = measure(models[1])
    assert result.speed.speculative is None and result.lossless.class_ is None
    assert result.speed.compressed.tokens_per_second > 0
    assert result.not_measured["speed.speculative"] == "the cache of Recurrent cannot be rolled back"
    assert explained(result)


def test_a_draft_with_another_vocabulary_is_the_users_mistake(measure: Measure, tiny: Callable[..., Path]) -> None:
    foreign = load(tiny("llama", seed=2))
    foreign.tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match="<extra>"):
        measure(foreign)


def test_costs_grow_with_nothing_but_the_text(models: tuple[Model, Model]) -> None:
    """Forwards are rolled back: the same text is in the cache for every width, so its length never shows."""
    _, target = models
    costs = measure_costs(target, [7, 8, 9], 6, seconds=0.0)
    assert costs.repeats == 3 and costs.context == 3
    assert set(costs.target_ms) == {1, 2, 3, 5, 7, 9, 17}
    assert costs.widths[1] == 1 and min(costs.target_ms.values()) > 0
    crowded = measure_costs(target, [7] * 250, 4, seconds=0.0)
    assert set(crowded.target_ms) == {1, 2, 3, 5}
    # A draft longer than the usual widths has its own, and room for it.
    assert 41 in measure_costs(target, [7], 40, seconds=0.0).target_ms


@pytest.mark.parametrize(
    ("other", "expected"),
    [([[1, 2, 3]], (3, 0)), ([[1, 9, 3]], (3, 1)), ([[1, 2]], (3, 1)), ([[4, 5, 6, 7]], (4, 4))],
)
def test_compare(other: list[list[int]], expected: tuple[int, int]) -> None:
    assert timing.compare([[1, 2, 3]], other) == expected


def test_repeated_share() -> None:
    assert timing.repeated_share([[1, 2, 3, 4, 5]]) == 0.0
    assert timing.repeated_share([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    # Texts are counted for themselves: what two of them share is no repetition.
    assert timing.repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0
    assert timing.repeated_share([[1, 2, 3]]) is None


def test_no_speed_has_every_key(self_drafted: speed.SpeedResult) -> None:
    nothing = speed.not_measured()
    assert nothing.speed.model_fields_set == self_drafted.speed.model_fields_set
    assert nothing.lossless.model_fields_set == self_drafted.lossless.model_fields_set
    assert set(dict(nothing.speed).values()) == {None}
