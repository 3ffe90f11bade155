from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.report import advice, speed, timing
from compress.report.not_measured import covers, null_paths
from compress.report.schema_speed import Lossless, Speed
from runtime import load
from runtime.cache.contiguous import ContiguousCache
from runtime.errors import UserError
from runtime.model.load import Model
from runtime.speculative.costs import measure_costs
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads
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
    assert stage == "speed" and 0 <= done <= total


@pytest.fixture(scope="module")
def self_drafted(models: tuple[Model, Model], windows: torch.Tensor) -> speed.SpeedResult:
    """The draft is the target itself: everything is accepted, so every figure is known but the times."""
    other, target = models
    return speed.measure(other, target, target, PROMPTS, windows, NEW, 3, quiet)


def explained(result: speed.SpeedResult) -> bool:
    paths = [f"speed.{path}" for path in null_paths(result.speed.model_dump()) if path != "baselines"]
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
    assert found.speculative.mean_width == pytest.approx(11 / 3)
    assert found.original.mean_width == found.compressed.mean_width == 1.0
    assert found.iid_speedup == pytest.approx(4 / (3 * found.draft_cost_ratio + found.width_cost_ratio))
    assert (found.prompts, found.new_tokens, found.draft_length, found.drafter) == (4, NEW, 3, "model")


def test_lossless_counts_every_token(self_drafted: speed.SpeedResult) -> None:
    expected = Lossless(class_="exact", verify="greedy", tokens_compared=4 * NEW, mismatches=0)
    assert self_drafted.lossless == expected


def test_derived_figures_follow_from_measured_ones(self_drafted: speed.SpeedResult) -> None:
    found = self_drafted.speed
    tau, c, v = found.tokens_per_round, found.draft_cost_ratio, found.width_cost_ratio
    assert found.predicted_speedup == pytest.approx(advice.predicted_speedup(tau, 3, c, v))
    rates = {name: found.pace(name) for name in ("original", "compressed", "speculative")}
    assert found.speedup.over_compressed == pytest.approx(rates["speculative"] / rates["compressed"])
    assert found.speedup.over_original == pytest.approx(rates["speculative"] / rates["original"])
    costs = {entry.width: entry.ratio for entry in found.width_costs}
    assert costs[1] == 1.0 and costs[4] == v and set(costs) == {1, 2, 3, 4, 5, 9, 17}
    assert found.advice == advice.advise(1.0, [1.0] * 3, c, costs)


def test_a_bad_draft_is_accepted_less(models: tuple[Model, Model], windows: torch.Tensor) -> None:
    other, target = models
    result = speed.measure(other, target, other, PROMPTS, windows, NEW, 3, quiet)
    found = result.speed
    assert found.acceptance_rate < 0.5 and found.teacher_forced_agreement < 0.5
    assert found.acceptance_rate == pytest.approx(sum(found.accepted_by_position) / 3, abs=0.2)
    assert result.lossless.mismatches == 0
    assert [group.prompts for group in found.groups] == [2, 2]
    assert found.groups[0].repeated_4gram_share <= found.groups[1].repeated_4gram_share


def test_without_a_draft_the_drafter_is_lookup(models: tuple[Model, Model], windows: torch.Tensor) -> None:
    original, target = models
    result = speed.measure(original, target, None, PROMPTS, windows, NEW, 3, quiet)
    assert result.speed.drafter == "lookup"
    assert result.speed.teacher_forced_agreement is None
    assert "no model that predicts" in result.not_measured["speed.teacher_forced_agreement"]
    # How much it costs is the machine's affair; that it was timed is not.
    assert result.speed.draft_cost_ratio is None or result.speed.draft_cost_ratio > 0
    assert explained(result)


def test_heads_draft_a_tree_and_have_no_figures_of_a_chain(
    models: tuple[Model, Model], windows: torch.Tensor, tmp_path: Path
) -> None:
    original, target = models
    heads = MedusaDrafter(load_heads(write_medusa(target.path, tmp_path / "medusa", scale=0.02), target))
    result = speed.measure(original, target, heads, PROMPTS, windows, NEW, 5, quiet)
    found = result.speed
    Speed.model_validate(found.model_dump())
    assert found.drafter == "medusa" and found.predicted_speedup > 0
    assert found.iid_speedup is None and found.advice is None
    assert "tree" in result.not_measured["speed.advice"]
    # By depth: at most one of a round's nodes at a depth is accepted, and none without its parent.
    reached = found.accepted_by_position
    assert reached == sorted(reached, reverse=True) and sum(reached) == pytest.approx(found.tokens_per_round - 1)
    assert result.lossless.mismatches == 0
    assert explained(result)


def test_a_text_of_one_token_leaves_nulls_with_reasons(models: tuple[Model, Model], windows: torch.Tensor) -> None:
    original, target = models
    result = speed.measure(original, target, target, PROMPTS[:1], windows, 1, 3, quiet)
    assert result.speed.acceptance_rate is None and result.speed.original.itl_ms.p50 is None
    assert explained(result)
    Speed.model_validate(result.speed.model_dump())


def test_a_target_that_cannot_roll_back_is_not_speculated_with(
    models: tuple[Model, Model], windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, target = models

    def refuse(self: ContiguousCache, request: int, length: int) -> None:
        if length < self.length(request):
            raise UserError("the cache of Recurrent cannot be rolled back")

    monkeypatch.setattr(ContiguousCache, "truncate", refuse)
    result = speed.measure(original, target, target, PROMPTS, windows, NEW, 3, quiet)
    assert result.speed.speculative is None and result.lossless.class_ is None
    assert result.speed.compressed.tokens_per_second > 0
    assert result.not_measured["speed.speculative"] == "the cache of Recurrent cannot be rolled back"
    assert explained(result)


def test_a_draft_with_another_vocabulary_is_the_users_mistake(
    models: tuple[Model, Model], windows: torch.Tensor, tiny: Callable[..., Path]
) -> None:
    original, target = models
    foreign = load(tiny("llama", seed=2))
    foreign.tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match="<extra>"):
        speed.measure(original, target, foreign, PROMPTS, windows, NEW, 3, quiet)


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
