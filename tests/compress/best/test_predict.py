"""What is proposed keeps the budgets, and is the best of what does."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from compress.best.acceptance import Drafts, pace
from compress.best.budgets import Budgets
from compress.best.costs import WIDTHS, Costs, key_of
from compress.best.predict import Known, propose, require_reachable
from compress.best.predict import key_of as name_of
from compress.best.quality import QualityModel
from compress.best.sizes import Sizes
from compress.best.space import CACHE, CACHES, INT8, KEEP, Option, Unit
from compress.errors import UserError

OPTIONS = (
    KEEP,
    INT8,
    Option("int4", 64, "gptq"),
    Option("int3", 32, "gptq"),
    Option("trellis-4", method="gptq"),
    Option("trellis-3", method="gptq"),
)
TIMES = (4.0, 2.0, 1.0, 1.1, 1.05, 0.9)
HELD = (8192, 4300, 2300, 2500, 2100, 1600)
DAMAGES = (
    (0.0, 0.001, 0.010, 0.03, 0.008, 0.02),
    (0.0, 0.002, 0.005, 0.02, 0.004, 0.015),
    (0.0, 0.001, 0.050, 0.2, 0.04, 0.15),
)
DRAFTS = Drafts("lookup", (1.0,) * 8, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2), 0.01)


CACHE_BYTES, CACHE_DAMAGES = (4000, 1100, 600), (0.0, 0.0005, 0.004)


def known(drafts: tuple[Drafts, ...] = (), caches: int = 1) -> Known:
    units = tuple(
        Unit(f"layers.{n}.fc", (f"layers.{n}.fc",), (f"layers.{n}.fc",), ((64, 64),), n, OPTIONS) for n in range(3)
    )
    parts = tuple(((f"{unit.name}.weight", "BF16", (64, 64)),) for unit in units)
    products = {
        key_of(units[0], option): tuple(ms * (1 + width / 20) for width in WIDTHS)
        for option, ms in zip(OPTIONS, TIMES, strict=True)
    }
    held = {key_of(units[0], option): size for option, size in zip(OPTIONS, HELD, strict=True)}
    costs = Costs(products, held, (0.5,) * len(WIDTHS), 1000, (0.1,) * len(WIDTHS))
    scales = tuple((f"layers.{n}.k_scale", "F32", (2, 1, 1)) for n in range(3))
    quality = QualityModel(DAMAGES, units, caches=CACHE_DAMAGES[:caches])
    return Known(units, Sizes(parts, units, scales), costs, drafts, quality, 500, CACHE_BYTES[:caches])


def every(model: Known) -> list[Any]:
    return [
        model.predict({unit.name: option for unit, option in zip(model.units, options, strict=True)} | held)
        for options in itertools.product(OPTIONS, repeat=3)
        if len({one.library for one in options if not one.keeps}) < 2
        for held in ({} if cache.keeps else {CACHE: cache} for cache in CACHES[: len(model.caches)])
    ]


@pytest.mark.parametrize(("disk", "quality"), [(12_000, 0.02), (9_000, 0.1)])
@pytest.mark.parametrize("caches", [1, 3])
@pytest.mark.parametrize("drafts", [(), (DRAFTS,)])
@pytest.mark.parametrize("goal", ["speed", "size", "quality"])
def test_the_first_proposal_is_the_best_of_all_within_the_budgets(
    goal: str, drafts: tuple[Drafts, ...], caches: int, disk: int, quality: float
) -> None:
    model = known(drafts, caches)
    budgets = Budgets(memory=1500 + 10_000 + (4000 if caches == 1 else 0), disk=disk, goal=goal)
    damage = None if goal == "quality" else quality
    within = [
        one
        for one in every(model)
        if one.disk <= disk and one.memory <= budgets.memory and (damage is None or one.damage <= damage)
    ]
    best = propose(model, budgets, damage)[0]
    assert best.key in {one.key for one in within}
    assert best.objective(goal) == pytest.approx(min(one.objective(goal) for one in within), rel=1e-6)


def test_keys_and_values_are_rounded_only_where_memory_asks_for_it() -> None:
    model = known(caches=3)
    roomy, tight = (propose(model, Budgets(memory=size, goal="quality"), None)[0] for size in (40_000, 27_500))
    assert CACHE not in roomy.assignment and tight.assignment[CACHE].scheme == "int8"
    assert tight.memory <= 27_500 < roomy.memory
    # The scales that it adds to the files count.
    plain = {name: option for name, option in tight.assignment.items() if name != CACHE}
    assert tight.disk > model.predict(plain).disk


def test_a_latency_is_kept_by_whoever_drafts_best() -> None:
    model = known((DRAFTS,))
    plain = propose(known(), Budgets(latency=3.0, goal="size"), None)
    drafted = propose(model, Budgets(latency=1.5, goal="quality"), None)
    assert plain == [] or 1e3 / plain[0].pace.tokens_per_second <= 3.0
    assert drafted and drafted[0].pace.drafter == "lookup" and 1e3 / drafted[0].pace.tokens_per_second <= 1.5


def test_what_cannot_be_reached_is_said_with_what_can_be() -> None:
    model = known()
    with pytest.raises(UserError, match=r"KL 0\.\d+ nats \(--quality or --kl\), or 0\.0\d MB \(--disk\)"):
        require_reachable(model, Budgets(kl=0.001, disk=8_000), 0.001)
    require_reachable(model, Budgets(kl=0.3, disk=9_000), 0.3)


def test_equal_assignments_have_one_name() -> None:
    assert name_of({"a": KEEP, "b": INT8}) == name_of({"b": INT8, "a": KEEP}) != name_of({"a": INT8, "b": KEEP})


def test_pace_is_of_the_best_drafter_at_its_best_length() -> None:
    forward = dict.fromkeys(WIDTHS, 2.0)
    best = pace(forward, [DRAFTS])
    assert (best.drafter, best.draft_length) == ("lookup", 8)
    assert best.tokens_per_second == pytest.approx(1e3 * (1 + sum(DRAFTS.accepted)) / (2.0 + 0.08))
    steep = {width: 2.0 * width for width in WIDTHS}
    assert pace(steep, [DRAFTS]).drafter == "none"
    assert pace(steep, []).tokens_per_second == pytest.approx(1e3 / steep[1])
    # What a drafter costs beside drafting counts for each of its rounds.
    dear = pace(forward, [replace(DRAFTS, beside=1.0)])
    assert dear.tokens_per_second < best.tokens_per_second
