"""Rows of trees by lists are those by tensors, and what is refused."""

import pytest
import torch

from runtime.cache.contiguous import ContiguousCache
from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import reserve
from runtime.cache.tree_rows import Trees, depths
from runtime.contract import Rows


def opened(*lengths: int) -> ContiguousCache:
    """A cache with requests of these lengths."""
    cache = ContiguousCache(CacheFormat(1, 1, 16, torch.device("cpu")))
    for length in lengths:
        cache.reserve(cache.open(100), length)
    return cache


def test_they_are_the_same_as_tensors() -> None:
    parents = [-1, 0, 0, 1, 1, 2]
    trees = Trees([(0, 7, 6), (1, 0, 3)], [parents, None])
    plain = Rows(
        torch.tensor([0] * 6 + [1] * 3),
        torch.tensor([7 + depth for depth in depths(parents)] + [0, 1, 2]),
        torch.tensor([*parents, -1, 6, 7]),
    )
    assert len(trees) == len(plain) == 9
    for name in ("request", "position", "parent"):
        assert torch.equal(getattr(trees, name), getattr(plain, name))
    assert reserve(trees, opened(7, 0)) == reserve(plain, opened(7, 0))


@pytest.mark.parametrize("parents", [[-1, 1], [0, 0], [-1, -2], [-1]])
def test_parents_that_are_no_earlier_rows_are_refused(parents: list[int]) -> None:
    assert len(reserve(Trees([(0, 7, 2)], [[-1, -1]]), opened(7))) == 1
    with pytest.raises(ValueError, match="not earlier rows"):
        reserve(Trees([(0, 7, 2)], [parents]), opened(7))
