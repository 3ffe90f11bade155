"""SparseGPT against a column loop in float64 straight from the paper, and against masks that refit nothing."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.prune import masks, sparsegpt
from compress.prune.masks import Sparsity, smallest

CASES: list[Sparsity] = [0.5, 0.3, (2, 4), (4, 8)]


def layer(rows: int, columns: int, seed: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated inputs whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(rank or columns, columns, generator=generator) / (rank or columns) ** 0.5
    scale = torch.rand(columns, generator=generator) * 3 + 0.1
    inputs = torch.randn(4 * columns, rank or columns, generator=generator) @ mix * scale
    return weight, inputs.T @ inputs / len(inputs)


def textbook(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damping: float = 0.01) -> Tensor:
    """One column at a time over all columns, in float64: inverse, Cholesky, mask, error, update."""
    work, h = weight.double().clone(), hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    removed = torch.zeros(weight.shape, dtype=torch.bool)
    for i in range(len(h)):
        if isinstance(sparsity, tuple) and i % sparsity[1] == 0:
            group = slice(i, i + sparsity[1])
            # What is left of the columns before is gone from the Hessian, so its inverse is that of the rest.
            inverse = torch.linalg.inv(h[i:, i:])[: sparsity[1], : sparsity[1]]
            removed[:, group] = cheapest(work[:, group], inverse, *sparsity)
        elif not isinstance(sparsity, tuple) and i % 128 == 0:
            scores = (work[:, i : i + 128] / upper.diagonal()[i : i + 128]).square()
            flat = smallest(scores.T.flatten(), round(sparsity * scores.numel()))
            removed[:, i : i + 128] = flat.view(scores.T.shape).T
        error = torch.where(removed[:, i], work[:, i], 0.0) / upper[i, i]
        work[:, i:] -= error[:, None] * upper[i, i:]
        work[removed[:, i], i] = 0
    return work


def cheapest(weights: Tensor, inverse: Tensor, kept: int, of: int) -> Tensor:
    costs = []
    subsets = list(combinations(range(of), of - kept))
    for subset in subsets:
        index = torch.tensor(subset)
        part = weights[:, index]
        costs.append((part @ torch.linalg.inv(inverse[index][:, index]) * part).sum(1))
    best = torch.stack(costs).argmin(0)
    out = torch.zeros(weights.shape, dtype=torch.bool)
    for row, choice in enumerate(best.tolist()):
        out[row, list(subsets[choice])] = True
    return out


def output_error(weight: Tensor, changed: Tensor, hessian: Tensor) -> float:
    """sqrt(tr(E H Eᵀ) / tr(W H Wᵀ)) with E = W − Ŵ, in float64."""
    wide, h = weight.double(), hessian.double()
    lost = wide - changed.double()
    return float((((lost @ h) * lost).sum() / ((wide @ h) * wide).sum()).sqrt())


@pytest.mark.parametrize("sparsity", CASES)
@pytest.mark.parametrize("columns", [48, 200, 288])
def test_it_is_the_textbooks_column_loop(sparsity: Sparsity, columns: int) -> None:
    weight, hessian = layer(24, columns, columns)
    found, expected = sparsegpt.prune(weight, hessian, sparsity), textbook(weight, hessian, sparsity)
    assert torch.equal(found == 0, expected == 0)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("sparsity", CASES)
def test_error_is_below_wandas_which_is_below_magnitudes(sparsity: Sparsity) -> None:
    weight, hessian = layer(64, 256, 5)
    errors = [
        output_error(weight, pruned, hessian)
        for pruned in (
            sparsegpt.prune(weight, hessian, sparsity),
            weight * masks.wanda_mask(weight, hessian.diagonal().sqrt(), sparsity),
            weight * masks.magnitude_mask(weight, sparsity),
        )
    ]
    assert errors[0] < 0.85 * errors[1] < 0.85 * errors[2]


def test_groups_removed_together_cost_less_than_members_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(factor: Tensor, of: int, subsets: list[tuple[int, ...]]) -> Tensor:
        # The paper's score w² / U_ii² of each member: the rows of a subset are its members' own.
        groups = [factor.diagonal()[i : i + of] for i in range(0, len(factor), of)]
        eye = torch.eye(of)[torch.tensor(subsets).flatten()]
        return torch.stack([eye / group for group in groups])

    weight = layer(128, 256, 6)[0]
    apart = (torch.arange(256)[:, None] - torch.arange(256)).abs()
    hessian = 0.9**apart  # neighbours say nearly the same: both are cheap, one after the other is not
    together = output_error(weight, sparsegpt.prune(weight, hessian, (2, 4)), hessian)
    monkeypatch.setattr(sparsegpt, "_subset_costs", alone)
    assert together < 0.99 * output_error(weight, sparsegpt.prune(weight, hessian, (2, 4)), hessian)


@pytest.mark.parametrize("sparsity", [0.5, 0.37])
def test_a_share_is_exact_in_every_block_of_128_columns(sparsity: float) -> None:
    weight, hessian = layer(20, 300, 7)
    zero = sparsegpt.prune(weight, hessian, sparsity) == 0
    for first, width in ((0, 128), (128, 128), (256, 44)):
        assert int(zero[:, first : first + width].sum()) == round(sparsity * 20 * width)


@pytest.mark.parametrize("pattern", [(2, 4), (4, 8), (1, 3), (4, 6)])
def test_patterns_hold_in_every_group(pattern: tuple[int, int]) -> None:
    weight, hessian = layer(16, 264, 8)
    pruned = sparsegpt.prune(weight, hessian, pattern)
    assert ((pruned != 0).view(-1, pattern[1]).sum(1) == pattern[0]).all()


def test_nothing_removed_is_nothing_changed() -> None:
    weight, hessian = layer(8, 64, 9)
    found = sparsegpt.prune(weight.bfloat16(), hessian, 0.0)
    assert torch.equal(found, weight.bfloat16().float())


def test_dead_channels_go_first_and_those_that_stay_are_untouched() -> None:
    weight, hessian = layer(16, 64, 10)
    dead = torch.tensor([0, 17, 40, 41])
    hessian[dead] = 0
    hessian[:, dead] = 0
    all_gone = sparsegpt.prune(weight, hessian, 0.5)
    assert torch.isfinite(all_gone).all()
    # Nearly all of their weights go before others: λ is a hundredth of what a live weight costs.
    assert (all_gone[:, dead] == 0).float().mean() > 0.9
    few = sparsegpt.prune(weight, hessian, 0.02)[:, dead]
    assert 0 < int((few == 0).sum()) < few.numel()
    assert torch.equal(few[few != 0], weight[:, dead][few != 0])


def test_a_rank_deficient_hessian_is_damped_as_much_as_it_needs() -> None:
    weight, hessian = layer(16, 96, 11, rank=12)
    assert int(torch.linalg.matrix_rank(hessian)) == 12
    usual = sparsegpt.prune(weight, hessian, 0.5)
    assert sparsegpt.cholesky(hessian, 0.01)[1] == 0.01
    assert output_error(weight, usual, hessian) < 0.1  # twelve dimensions need no more than half of 96 weights
    broken = hessian - 0.005 * hessian.diagonal().mean() * torch.eye(96)
    broken.diagonal().clamp_(min=0)
    grown = sparsegpt.prune(weight, broken, 0.5, damping=0.0)
    assert sparsegpt.cholesky(broken, 0.0)[1] > 0.001
    assert torch.isfinite(grown).all()
    full = layer(16, 96, 11)[1]
    assert sparsegpt.cholesky(full, 0.0)[1] == 0.0


def test_an_input_that_never_came_leaves_plain_magnitude() -> None:
    weight = layer(16, 64, 12)[0]
    found = sparsegpt.prune(weight, torch.zeros(64, 64), 0.5)
    assert torch.equal(found, weight * masks.magnitude_mask(weight, 0.5))


def test_a_constant_weight_on_one_constant_input() -> None:
    weight = torch.full((8, 32), 0.5)
    found = sparsegpt.prune(weight, torch.ones(32, 32), (2, 4))
    assert ((found != 0).view(-1, 4).sum(1) == 2).all()
    # All inputs say the same: those to come take over the sum, until none are left to come.
    assert output_error(weight, found, torch.ones(32, 32)) < 0.2
    plain = weight * masks.magnitude_mask(weight, (2, 4))
    assert output_error(weight, plain, torch.ones(32, 32)) == pytest.approx(0.5)


def test_what_cannot_be_pruned_is_said() -> None:
    weight, hessian = layer(4, 20, 13)
    assert int((sparsegpt.prune(weight, hessian, (2, 4)) == 0).sum()) == 40
    for bad in (math.nan, math.inf):
        broken = hessian.clone()
        broken[3, 5] = bad
        with pytest.raises(ValueError, match="Hessian holds NaN or Inf"):
            sparsegpt.prune(weight, broken, 0.5)
        with pytest.raises(ValueError, match="weight holds NaN or Inf"):
            sparsegpt.prune(weight.clone().fill_(bad), hessian, 0.5)
    with pytest.raises(ValueError, match="Hessian of 20 inputs"):
        sparsegpt.prune(weight, hessian[:19, :19], 0.5)
    with pytest.raises(ValueError, match="multiple of 8, found 20"):
        sparsegpt.prune(weight, hessian, (4, 8))
    with pytest.raises(ValueError, match="negative diagonal"):
        sparsegpt.prune(weight, -hessian, 0.5)
    with pytest.raises(ValueError, match="no Cholesky factor even at a damping of 1"):
        sparsegpt.prune(weight, hessian.diagonal().mean() * (torch.full((20, 20), -3.0) + 4 * torch.eye(20)), 0.5)
    with pytest.raises(ValueError, match="at most 70 subsets"):
        sparsegpt.prune(weight, hessian, (10, 20))
