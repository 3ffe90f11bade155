"""The table of tile sizes holds what the kernels can be compiled for, and splits only what the scheme and K say."""

from itertools import pairwise

import pytest
import torch

from runtime.kernels.triton import tile_sizes
from runtime.kernels.triton.weight_layout import PER_BYTE

ALL = [*tile_sizes.PLANS.values(), tile_sizes.INTERPRETER]


@pytest.mark.parametrize("plans", ALL)
def test_tiles(plans: dict[str, tile_sizes.Plan]) -> None:
    assert {"integer", "float"} <= set(plans) <= {"integer", "float", *PER_BYTE}
    for name, plan in plans.items():
        for tiles in (plan.narrow, plan.wide, plan.few):
            if tiles is None:
                continue
            for size in (tiles.block_n, tiles.block_t, tiles.warps, tiles.block_k or 16):
                assert size & (size - 1) == 0
            assert tiles.block_n >= 16
            assert tiles.stages >= 1
        assert plan.narrow.block_t >= tile_sizes.NARROW
        # Where a float sum is cut must not depend on the width.
        assert plan.narrow.block_k == plan.wide.block_k
        assert (plan.few is None) == (plan.least == 0)
        if name == "float":
            assert plan.few is None


def test_a_kind_may_have_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper, device = tile_sizes.PLANS[9, 0], torch.device("cuda")
    assert tile_sizes.plan("int8", device) == hopper["int8"] != hopper["integer"]
    assert tile_sizes.plan("int4", device) == tile_sizes.plan("planes", device) == hopper["integer"]
    assert tile_sizes.plan("fp8", device) == tile_sizes.plan("float", device) == hopper["float"]


def test_newest_first() -> None:
    assert all(newer > older for newer, older in pairwise(tile_sizes.PLANS))


def test_rows_choose_tiles() -> None:
    for plans in ALL:
        for whole, floats, most in ((plans["float"], True, 16), (plans["integer"], False, 64)):
            tile = min(whole.narrow.block_t, most)
            for rows, expected in ((1, 8), (8, 8), (9, 16), (16, 16), (most, tile)):
                found = tile_sizes.for_rows(whole, rows, floats)
                assert (found.block_n, found.block_t) == (whole.narrow.block_n, min(expected, tile))
            assert tile_sizes.for_rows(whole, most + 1, floats) is whole.wide


def test_splits_follow_the_inputs() -> None:
    assert [tile_sizes.splits(k) for k in (1, 1023, 1024, 14336)] == [1, 1, 4, 4]


def test_a_device_gets_the_newest_plan_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, expected in (((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((12, 0), (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where, found=capability: found)
        assert tile_sizes.plan("int4", device) == tile_sizes.PLANS[expected]["integer"]
        assert tile_sizes.plan("float", device, 64) == tile_sizes.PLANS[expected]["float"]
    small, large = tile_sizes.plan("ternary", device, 2048), tile_sizes.plan("ternary", device, 32_000)
    assert small.narrow == tile_sizes.PLANS[9, 0]["ternary"].few
    assert large == tile_sizes.PLANS[9, 0]["ternary"]
