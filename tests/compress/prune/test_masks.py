"""Masks against brute force: exactly the asked share, of the right weights; and what a sparse store would take."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.prune import masks
from compress.prune.masks import largest_of_group, smallest

PATTERNS = [(2, 4), (4, 8), (1, 4), (3, 4)]


def draw(rows: int, columns: int, seed: int, levels: int | None = None) -> Tensor:
    """Random weights; with `levels` of few distinct values, so that ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(rows, columns, generator=generator)
    return torch.randint(-levels, levels + 1, (rows, columns), generator=generator).float()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 10_000), st.sampled_from([None, 1, 3]), st.data())
@settings(deadline=None, max_examples=150)
def test_smallest_is_a_stable_sort(rows: int, columns: int, seed: int, levels: int | None, data: st.DataObject) -> None:
    scores = draw(rows, columns, seed, levels)
    count = data.draw(st.integers(0, columns))
    expected = np.zeros((rows, columns), dtype=bool)
    order = np.argsort(scores.numpy(), axis=1, kind="stable")[:, :count]
    np.put_along_axis(expected, order, True, axis=1)
    assert np.array_equal(smallest(scores, count).numpy(), expected)


@given(st.sampled_from(PATTERNS), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([None, 1]))
@settings(deadline=None, max_examples=80)
def test_groups_keep_their_largest(pattern: tuple[int, int], groups: int, seed: int, levels: int | None) -> None:
    kept, of = pattern
    scores = draw(groups, of, seed, levels)
    expected = np.ones((groups, of), dtype=bool)
    np.put_along_axis(expected, np.argsort(scores.numpy(), axis=1, kind="stable")[:, : of - kept], False, axis=1)
    assert np.array_equal(largest_of_group(scores, kept).numpy(), expected)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitude_removes_the_smallest_of_the_whole_weight(share: float, dtype: torch.dtype) -> None:
    weight = draw(13, 31, 1).to(dtype)
    kept = masks.magnitude_mask(weight, share)
    assert int((~kept).sum()) == round(share * 13 * 31)
    if share:
        assert weight[~kept].abs().max() <= weight[kept].abs().min()
        assert len(set((~kept).sum(1).tolist())) > 1  # the share is the layer's, not each row's


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_wanda_removes_exactly_the_share_of_each_row_by_its_score(share: float) -> None:
    weight, norms = draw(7, 30, 2), draw(1, 30, 3)[0].abs() * 5
    kept = masks.wanda_mask(weight, norms, share)
    for row, mask in zip(weight, kept, strict=True):
        removed = sorted(range(30), key=lambda j: float(row[j].abs() * norms[j]))[: round(share * 30)]
        assert sorted(removed) == torch.nonzero(~mask).flatten().tolist()
    assert not torch.equal(kept, masks.wanda_mask(weight, torch.ones(30), share))  # the inputs matter


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_hold_in_every_group(pattern: tuple[int, int]) -> None:
    weight, norms = draw(6, 48, 4), draw(1, 48, 5)[0].abs()
    for kept, scores in (
        (masks.magnitude_mask(weight, pattern), weight.abs()),
        (masks.wanda_mask(weight, norms, pattern), weight.abs() * norms),
    ):
        groups, by = kept.view(-1, pattern[1]), scores.view(-1, pattern[1])
        assert (groups.sum(1) == pattern[0]).all()
        assert (by.masked_fill(~groups, torch.inf).amin(1) >= by.masked_fill(groups, 0).amax(1)).all()


def test_a_constant_layer_and_dead_channels_still_lose_exactly_the_share() -> None:
    weight = torch.full((5, 16), 0.25)
    assert ((~masks.wanda_mask(weight, torch.ones(16), 0.5)).sum(1) == 8).all()
    assert int((~masks.magnitude_mask(weight, 0.5)).sum()) == 40
    norms = torch.ones(16)
    norms[[3, 4, 9]] = 0  # dead inputs cost nothing: they go first
    assert not masks.wanda_mask(weight, norms, 0.25)[:, [3, 4, 9]].any()


def test_what_cannot_be_masked_is_said() -> None:
    weight = draw(4, 12, 6)
    assert masks.magnitude_mask(weight, (2, 4)).sum() == 24
    with pytest.raises(ValueError, match="multiple of 8, found 12"):
        masks.magnitude_mask(weight, (4, 8))
    for sparsity in (1.0, -0.1, (4, 4), (0, 4)):
        with pytest.raises(ValueError, match="expected a"):
            masks.magnitude_mask(weight, sparsity)
    for bad in (math.nan, math.inf):
        broken = weight.clone()
        broken[1, 2] = bad
        with pytest.raises(ValueError, match="weight holds NaN or Inf"):
            masks.wanda_mask(broken, torch.ones(12), 0.5)
        with pytest.raises(ValueError, match="norms of the inputs hold NaN"):
            masks.wanda_mask(weight, torch.full((12,), bad), 0.5)
    with pytest.raises(ValueError, match="norms of 12 inputs"):
        masks.wanda_mask(weight, torch.ones(11), 0.5)
    with pytest.raises(ValueError, match="scores hold NaN"):
        smallest(torch.tensor([1.0, math.nan, math.nan]), 2)
