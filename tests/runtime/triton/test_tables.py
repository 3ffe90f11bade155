"""The table of tile sizes holds what the kernels can be compiled for, and splits only what the scheme and K say."""

from itertools import pairwise

import pytest
import torch

from runtime.kernels.triton import tables
from runtime.kernels.triton.layout import CHUNKS

ALL = [*tables.PLANS.values(), tables.INTERPRETER]


@pytest.mark.parametrize("plans", ALL)
def test_tiles(plans: dict[str, tables.Plan]) -> None:
    assert set(plans) == {"integer", "float"}
    for name, plan in plans.items():
        for tiles in (plan.narrow, plan.wide, plan.few):
            if tiles is None:
                continue
            for size in (tiles.block_n, tiles.block_t, tiles.warps, tiles.block_k or 16):
                assert size & (size - 1) == 0
            assert tiles.block_n >= 16
            assert tiles.stages >= 1
        assert plan.narrow.block_t == tables.NARROW
        # What a float product's split is cut at, and the instruction it runs on, must not depend on the width.
        assert plan.narrow.block_k == plan.wide.block_k
        if name == "float":
            assert plan.few is None


def test_newest_first() -> None:
    assert all(newer > older for newer, older in pairwise(tables.PLANS))


def test_rows_choose_tiles() -> None:
    for plans in ALL:
        whole, packed = plans["float"], plans["integer"]
        assert all(tables.for_rows(whole, rows, 0) is whole.narrow for rows in (1, 8, 16))
        assert tables.for_rows(whole, 17, 0) is whole.wide
        for chunk in CHUNKS:
            assert tables.for_rows(packed, tables.LEAST, chunk).block_t in (tables.LEAST, tables.NARROW)
            assert tables.for_rows(packed, tables.NARROW, chunk) is packed.narrow
            assert tables.for_rows(packed, 17, chunk) is packed.wide


def test_splits_follow_the_inputs() -> None:
    assert [tables.splits("int4", k) for k in (1, 4096, 4097, 14336)] == [1, 1, 2, 4]
    assert [tables.splits("float", k) for k in (64, 2048, 4096, 14336)] == [1, 1, 2, 7]
    assert tables.splits("nf4", 11008) == tables.splits("ternary", 11008)


def test_a_device_gets_the_newest_plan_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, expected in (((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((12, 0), (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where, found=capability: found)
        assert tables.plan("nf4", device) == tables.PLANS[expected]["integer"]
        assert tables.plan("float", device, 64) == tables.PLANS[expected]["float"]
    small, large = tables.plan("int4", device, 2048), tables.plan("int4", device, 32_000)
    assert small.narrow == tables.PLANS[9, 0]["integer"].few
    assert large == tables.PLANS[9, 0]["integer"]
