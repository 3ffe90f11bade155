"""GPTQ against the paper's column-by-column rule in float64, and what coordinate descent adds; bad layers too."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.quantize.gptq import Rounded, quantize_together
from compress.quantize.grid import Grid, decode, encode, fit, fit_groups
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import spread
from runtime.kernels.dispatch import available, choose, linear
from runtime.kernels.reference import packed_linear

BF16 = torch.bfloat16


def layer(n: int, k: int, tokens: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight (n, k), and the Hessian of inputs that are correlated, with channels of different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + 0.3
    x = torch.randn(tokens or 4 * k, k, generator=generator) @ mix * torch.logspace(-1, 0.5, k)[torch.randperm(k)]
    return torch.randn(n, k, generator=generator) * 0.02, x.T @ x / len(x)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def read_back(packed: PackedWeight) -> Tensor:
    return spread(packed.codes.float(), packed)


def output_error(weight: Tensor, found: Tensor, hessian: Tensor) -> float:
    """tr(E H Eᵀ) in float64."""
    lost = (weight - found).double()
    return float(((lost @ hessian.double()) * lost).sum())


def nearest(weight: Tensor, grid: Grid, search: bool = False) -> Tensor:
    scale, zero = fit(weight, grid, BF16, search=search)
    return decode(encode(weight, scale, zero, grid), scale, zero, grid)


def quantize(weight: Tensor, hessian: Tensor, grid: Grid, dtype: torch.dtype, **options: Any) -> Rounded:
    return quantize_together([weight], hessian, grid, dtype, **options)[0]


def textbook(weight: Tensor, hessian: Tensor, grid: Grid, order: bool) -> Tensor:
    """The paper's algorithm, a column at a time, through the Cholesky factor of the inverse Hessian."""
    k = len(hessian)
    width = grid.group_size or k
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(k, dtype=torch.float64)
    turns = hessian.diagonal().argsort(descending=True, stable=True) if order else torch.arange(k)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped[turns][:, turns]), upper=True)
    left = weight.double()[:, turns]
    found = torch.empty_like(left)
    fits: dict[int, tuple[Tensor, Tensor]] = {}
    for j in range(k):
        group = int(turns[j]) // width
        if group not in fits:
            inside = slice(group * width, (group + 1) * width)
            source = weight[:, inside] if order else left[:, inside].float()
            fits[group] = fit_groups(source.T.contiguous(), grid, BF16)
        scale, zero = (t.double() for t in fits[group])
        codes = (torch.round(left[:, j] / scale) + zero).clamp(grid.low, grid.high)
        found[:, j] = (codes - zero) * scale
        rest = (left[:, j] - found[:, j]) / upper[j, j]
        left[:, j:] -= rest.unsqueeze(1) * upper[j, j:]
    back = torch.empty_like(found)
    back[:, turns] = found
    return back.float()


ORDERS = {"plain": {}, "static": {"order": True}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("k", "grid"),
    [
        (96, Grid(4, 32)),
        (96, Grid(3, 8, symmetric=False)),
        (200, Grid(2, 0)),
        (300, Grid(3, 150, symmetric=False)),  # groups that are wider than a block and end inside one
        (130, Grid(4, 13)),
        (5, Grid(4, 1)),
    ],
    ids=str,
)
def test_without_passes_it_is_the_papers_rule(k: int, grid: Grid, order: str) -> None:
    weight, hessian = layer(24, k)
    found = quantize(weight, hessian, grid, BF16, search=False, passes=0, **ORDERS[order])
    expected = textbook(weight, hessian, grid, order=order == "static")
    # A tie that float32 breaks the other way changes what follows in its row, so one row may differ.
    same = (read_back(found.packed) - expected).abs().amax(dim=1) < 1e-4 * weight.abs().max()
    assert int(same.sum()) >= 23
    assert found.damping == pytest.approx(0.01)
    assert found.packed.perm is None


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (3, 64), (2, 32)])
def test_each_step_lowers_the_error(bits: int, group: int, symmetric: bool, order: str) -> None:
    weight, hessian = layer(64, 256)
    grid = Grid(bits, group, symmetric)

    def error(**options: object) -> float:
        found = quantize(weight, hessian, grid, BF16, **ORDERS[order], **options)
        relative = output_error(weight, read_back(found.packed), hessian) / output_error(weight, 0 * weight, hessian)
        # What is reported was carried along, and never computed from the result.
        assert found.error == pytest.approx(relative**0.5, rel=1e-3)
        return relative

    rounded = output_error(weight, nearest(weight, grid), hessian) / output_error(weight, 0 * weight, hessian)
    plain, searched = error(search=False, passes=0), error(passes=0)
    assert searched < 0.97 * plain and plain < 0.7 * rounded
    once, twice = error(passes=1), error(passes=2)
    assert twice <= once < searched


@pytest.mark.parametrize("width", [16, 160, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_in_the_end_no_single_code_and_no_scale_can_be_better(width: int, symmetric: bool) -> None:
    weight, hessian = layer(4, 160 if width == 16 else 320)
    grid = Grid(3, width, symmetric)
    found = quantize(weight, hessian, grid, torch.float32, passes=60).packed
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    best = read_back(found)
    least = output_error(weight, best, damped)
    whole = (0.5 * damped.diagonal().mean() * found.scale.double().mean() ** 2).item()
    every = found.scale.shape[1]
    for row, column in itertools.product(range(4), range(0, weight.shape[1], 7)):
        for step in (-1, 1):
            if grid.low <= int(found.codes[row, column]) + step <= grid.high:
                codes = found.codes.clone()
                codes[row, column] += step
                other = output_error(weight, read_back(replace(found, codes=codes)), damped)
                assert other > least - 1e-4 * whole
    for row, group, factor in itertools.product(range(4), range(every), (0.99, 1.01)):
        change = torch.ones_like(found.scale)
        change[row, group] = factor
        offset = None if found.offset is None else found.offset * change
        other = output_error(weight, read_back(replace(found, scale=found.scale * change, offset=offset)), damped)
        assert other > least


def test_layers_together_are_layers_alone() -> None:
    weight, hessian = layer(70, 128)
    parts = list(weight.split([32, 8, 30]))
    together = quantize_together(parts, hessian, Grid(4, 32), BF16, order=True)
    assert len(together) == 3
    for part, found in zip(parts, together, strict=True):
        alone = quantize(part, hessian, Grid(4, 32), BF16, order=True)
        assert found.packed.shape == part.shape
        # Products of other widths round differently, so the last bits may fall otherwise.
        assert (found.packed.codes != alone.packed.codes).float().mean() < 0.01
        assert found.error == pytest.approx(alone.error, rel=1e-3)


def test_it_only_reads_and_gives_the_same_again() -> None:
    weight, hessian = layer(16, 64)
    kept = weight.clone(), hessian.clone()
    first, second = (quantize(weight, hessian, Grid(4, 16), BF16) for _ in range(2))
    assert torch.equal(weight, kept[0]) and torch.equal(hessian, kept[1])
    assert torch.equal(first.packed.codes, second.packed.codes) and first.error == second.error
    assert torch.equal(first.packed.scale, first.packed.scale.to(BF16).float())
    half = quantize(weight.bfloat16(), hessian, Grid(4, 16), BF16)
    assert torch.equal(half.packed.codes, quantize(weight.bfloat16().float(), hessian, Grid(4, 16), BF16).packed.codes)


def test_dead_inputs_are_rounded_to_nearest() -> None:
    weight, hessian = layer(32, 96)
    dead = torch.zeros(96, dtype=torch.bool)
    dead[[3, 40, 41, 95]] = True
    hessian[dead], hessian[:, dead] = 0, 0
    for order in ORDERS.values():
        found = quantize(weight, hessian, Grid(4, 32), BF16, search=False, **order)
        packed = found.packed
        expected = encode(weight, packed.scale, torch.zeros_like(packed.scale), Grid(4, 32))
        assert torch.equal(packed.codes[:, dead], expected[:, dead])
        # The others do not, because they make up for each other.
        assert (packed.codes != expected).float().mean() > 0.05
    nothing = quantize(weight, torch.zeros(96, 96), Grid(4, 32), BF16, search=False, passes=0)
    assert torch.equal(read_back(nothing.packed), nearest(weight, Grid(4, 32)))
    assert nothing.error == 0


def test_a_rank_deficient_hessian_is_damped_as_far_as_it_needs() -> None:
    weight, hessian = layer(32, 128, tokens=20)
    asked = quantize(weight, hessian, Grid(4, 32), BF16)
    assert asked.damping == pytest.approx(0.01)
    more = quantize(weight, hessian, Grid(4, 32), BF16, damping=0.0)
    assert 0 < more.damping < 0.01
    whole, full = layer(32, 128)
    assert quantize(whole, full, Grid(4, 32), BF16, damping=0.0).damping == 0
    for found in (asked, more):
        assert output_error(weight, read_back(found.packed), hessian) < 0.2 * output_error(
            weight, nearest(weight, Grid(4, 32)), hessian
        )
        # And where no token ever was, the weights are still about what they were.
        assert (read_back(found.packed) - weight).norm() < 0.5 * weight.norm()


def test_constant_and_zero_layers() -> None:
    _, hessian = layer(1, 64)
    zeros = quantize(torch.zeros(8, 64), hessian, Grid(4, 16), BF16)
    assert zeros.error == 0 and float(read_back(zeros.packed).abs().max()) == 0
    for symmetric in (True, False):
        constant = quantize(torch.full((8, 64), 0.5), hessian, Grid(4, 16, symmetric), BF16)
        assert constant.error < 0.004
        ones = torch.ones(64, 64)  # all channels alike
        assert quantize(torch.full((8, 64), -0.5), ones, Grid(4, 16, symmetric), BF16).error < 0.004
    one = quantize(torch.full((1, 1), 0.3), torch.ones(1, 1), Grid(4, 0), BF16)
    assert one.error < 0.004


@pytest.mark.parametrize("order", ORDERS)
def test_the_runtime_computes_what_was_chosen(order: str) -> None:
    """Negative scales and zero points included: native kernels give the reference's bits."""
    weight, hessian = layer(48, 128)
    x = torch.randn(5, 128) * 0.3
    for grid in (Grid(4, 32), Grid(3, 32), Grid(2, 16), Grid(4, 32, symmetric=False)):
        packed = quantize(weight, hessian, grid, BF16, **ORDERS[order]).packed
        assert not grid.symmetric or bool((packed.scale < 0).any())
        expected = packed_linear(packed)(x)
        for kernel in available("cpu", 1):
            if kernel.usable and kernel.exact:
                found = linear(packed, None, choose(kernel.name, "cpu", 1))(x)
                assert torch.equal(found, expected), kernel.name
        # int8 activations are a hundredth off.
        exact = x @ read_back(packed).T
        assert (expected - exact).norm() < 0.03 * exact.norm()


def test_bad_input_is_refused() -> None:
    weight, hessian = layer(8, 32)

    def spoilt(tensor: Tensor, value: float) -> Tensor:
        bad = tensor.clone()
        bad[3, 5] = value
        return bad

    def run(w: Tensor, h: Tensor, grid: Grid = Grid(4, 16), **options: bool) -> Rounded:  # noqa: B008
        return quantize(w, h, grid, torch.float16, **options)

    assert run(weight, hessian).error < 0.2
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the weight has values"):
            run(spoilt(weight, bad), hessian)
        with pytest.raises(ValueError, match="the Hessian has values"):
            run(weight, spoilt(hessian, bad))
    with pytest.raises(ValueError, match="not a Gram matrix"):
        run(weight, -hessian)
    with pytest.raises(ValueError, match="do not fit a Hessian"):
        run(weight[:, :16], hessian)
    with pytest.raises(ValueError, match="do not divide"):
        run(weight, hessian, Grid(4, 12))
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        run(weight * 1e9, hessian)
