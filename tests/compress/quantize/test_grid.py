"""Grids: codes and scales as the formats store them, for any weight and any number of bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quantize.grid import Grid, decode, encode, fit, to_packed
from runtime.formats import int4
from runtime.formats.tensors import spread


def weight(n: int, k: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    """Rows of different size with a few large values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator) ** 3 + shift
    return values * torch.logspace(-3, 1, n).unsqueeze(1)


def squared_error(w: Tensor, grid: Grid, scale: Tensor, zero: Tensor, importance: Tensor | None = None) -> Tensor:
    """By group, (N, G)."""
    lost = (decode(encode(w, scale, zero, grid), scale, zero, grid) - w).double().square()
    lost = lost if importance is None else lost * importance
    return lost.view(len(w), scale.shape[1], -1).sum(-1)


grids = st.builds(Grid, st.integers(2, 8), st.sampled_from([0, 1, 4, 12]), st.booleans())
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@settings(max_examples=150, deadline=None)
@given(
    grids,
    dtypes,
    st.lists(st.floats(-100, 100, width=16), min_size=24, max_size=24),
    st.booleans(),
)
def test_codes_fit_and_are_the_nearest(grid: Grid, dtype: torch.dtype, numbers: list[float], search: bool) -> None:
    w = torch.tensor(numbers).view(2, 12)
    scale, zero = fit(w, grid, dtype, search=search)
    groups = 12 // (grid.group_size or 12)
    assert scale.shape == zero.shape == (2, groups)
    assert torch.equal(scale.to(dtype).float(), scale) and bool((scale != 0).all())
    codes = encode(w, scale, zero, grid)
    assert codes.dtype == torch.int8
    assert grid.low <= int(codes.min()) and int(codes.max()) <= grid.high
    assert torch.equal(zero, zero.round()) and grid.low <= float(zero.min()) and float(zero.max()) <= grid.high
    if grid.symmetric:
        assert float(zero.abs().max()) == 0
    # No other code is nearer than the rounding of a division in float32.
    every = torch.arange(grid.low, grid.high + 1).view(-1, 1, 1)
    wide_scale, wide_zero = (t.repeat_interleave(12 // groups, dim=1).double() for t in (scale, zero))
    distance = ((every - wide_zero) * wide_scale - w).abs().amin(dim=0)
    found = decode(codes, scale, zero, grid)
    assert ((found - w).abs() <= distance + 1e-5 * (wide_scale.abs() + w.abs())).all()
    # Nor is a weight in the grid's range further than half a step.
    low, high = ((end - wide_zero) * wide_scale for end in (grid.low, grid.high))
    inside = (w >= torch.minimum(low, high)) & (w <= torch.maximum(low, high))
    assert ((found - w).abs()[inside] <= (0.5 * wide_scale.abs() + 1e-5 * w.abs() + 1e-9)[inside]).all()


@settings(max_examples=80, deadline=None)
@given(grids, dtypes, st.integers(0, 10_000), st.booleans())
def test_a_search_never_loses(grid: Grid, dtype: torch.dtype, seed: int, weighted: bool) -> None:
    w = weight(3, 24, seed)
    importance = torch.rand(24, generator=torch.Generator().manual_seed(seed)) if weighted else None
    plain = squared_error(w, grid, *fit(w, grid, dtype), importance)
    scale, zero = fit(w, grid, dtype, importance, search=True)
    found = squared_error(w, grid, scale, zero, importance)
    # The search compares what is left of Σ h w², in float32.
    whole = (w.square() * (1 if importance is None else importance)).view(3, scale.shape[1], -1).sum(-1)
    assert (found <= plain + 1e-6 * whole).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_search_gains(bits: int, symmetric: bool) -> None:
    w, grid = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), Grid(bits, 64, symmetric)
    importance = torch.logspace(-2, 2, 64).repeat(4)
    blind = fit(w, grid, torch.bfloat16, search=True)
    gain = {2: 0.75, 3: 0.9, 4: 0.97}[bits]
    assert squared_error(w, grid, *blind).sum() < gain * squared_error(w, grid, *fit(w, grid, torch.bfloat16)).sum()
    found = squared_error(w, grid, *fit(w, grid, torch.bfloat16, importance, search=True), importance)
    each = torch.rand(64, 1) * importance
    by_weight = fit(w, grid, torch.bfloat16, each.expand(64, 256), search=True)
    assert found.sum() < 0.9 * squared_error(w, grid, *blind, importance).sum()
    # A factor by row changes no row's best scale.
    assert squared_error(w, grid, *by_weight, importance).sum() < 1.01 * found.sum()


def test_a_symmetric_search_uses_the_longer_side() -> None:
    """2 bits reach −2..1 steps: one large positive weight wants the scale negative."""
    w = torch.tensor([[2.0, 1.0, -1.0, 0.0], [-2.0, -1.0, 1.0, 0.0]])
    scale, zero = fit(w, Grid(2, 4), torch.bfloat16, search=True)
    assert torch.equal(scale, torch.tensor([[-1.0], [1.0]]))
    assert torch.equal(decode(encode(w, scale, zero, Grid(2, 4)), scale, zero, Grid(2, 4)), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_four_symmetric_bits_are_the_formats_own(dtype: torch.dtype) -> None:
    w, grid = weight(40, 256), Grid(4, 64)
    scale, zero = fit(w, grid, dtype)
    found, expected = to_packed(encode(w, scale, zero, grid), scale, zero, grid), int4.pack(w, 64, scale_dtype=dtype)
    assert found.scheme == expected.scheme and found.offset is None
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("search", [True, False])
def test_zeros_constants_and_one_sided_groups(symmetric: bool, search: bool) -> None:
    grid = Grid(4, 4, symmetric)
    rows = [[0.0] * 4, [3.0] * 4, [-3.0] * 4, [0, 0, 0, 5.0], [1e-30] * 4, [1e-44, 0, 0, 0], [9, 10, 11, 12.0]]
    w = torch.tensor(rows)
    scale, zero = fit(w, grid, torch.bfloat16, torch.tensor([1.0, 0, 1, 1]) if search else None, search)
    back = decode(encode(w, scale, zero, grid), scale, zero, grid)
    assert torch.isfinite(scale).all() and torch.equal(back[0], w[0])
    # 7 steps of absmax / 7.5 where the grid is symmetric and nothing is searched.
    bound = 0.004 if search or not symmetric else 0.07
    for row in (1, 2, 3, 4):
        # The squares of 1e-30 are nothing in float32, so there is nothing to search.
        assert ((back[row] - w[row]).abs() <= (bound if row < 4 else 0.07) * w[row].abs().max()).all(), row
    assert float(back[5].abs().max()) < 1e-30
    assert ((back[6] - w[6]).abs() <= 12 / (15 if not symmetric else 7)).all()


def test_importance_of_zero_has_no_say() -> None:
    w = torch.tensor([[0.1, -0.2, 0.3, 1.0]])
    grid, importance = Grid(4, 4), torch.tensor([1.0, 1.0, 1.0, 0.0])
    scale, zero = fit(w, grid, torch.float32, importance, search=True)
    assert squared_error(w, grid, scale, zero, importance) < 0.3 * squared_error(
        w, grid, *fit(w, grid, torch.float32, search=True), importance
    )
    # Where nothing counts the range is the plain one.
    nothing = fit(w, grid, torch.float32, torch.zeros(4), search=True)
    assert torch.equal(nothing[0], fit(w, grid, torch.float32)[0])


def test_packed_means_what_decode_says() -> None:
    w, grid = weight(8, 24, shift=1.0), Grid(3, 8, symmetric=False)
    scale, zero = fit(w, grid, torch.bfloat16)
    codes = encode(w, scale, zero, grid)
    packed = to_packed(codes, scale, zero, grid, bias=torch.ones(8, dtype=torch.bfloat16))
    assert (packed.scheme.kind, packed.scheme.bits, packed.scheme.symmetric) == ("int4", 3, False)
    assert packed.bias is not None and packed.bias.dtype == torch.float32
    assert torch.allclose(spread(codes.float(), packed), decode(codes, scale, zero, grid), atol=1e-6)
    for bits in (6, 5):
        five = Grid(bits, 8, symmetric=False)
        scale, zero = fit(w, five, torch.bfloat16)
        codes = encode(w, scale, zero, five)
        packed = to_packed(codes, scale, zero, five)
        assert (packed.scheme.kind, packed.scheme.bits) == ("int6", bits)
        assert torch.allclose(spread(codes.float(), packed), decode(codes, scale, zero, five), atol=1e-6)
    eight = Grid(8, 0)
    assert to_packed(encode(w, *fit(w, eight, torch.bfloat16), eight), scale, zero, eight).scheme.kind == "int8"
    for grid in (Grid(7, 8), Grid(8, 8), Grid(8, 0, symmetric=False)):
        with pytest.raises(ValueError, match="formats hold"):
            to_packed(codes, scale, zero, grid)


def test_bad_weights_are_refused() -> None:
    w = weight(4, 24)
    with pytest.raises(ValueError, match="do not divide"):
        fit(w, Grid(4, 7), torch.bfloat16)
    for bad in (math.nan, math.inf):
        spoilt = w.clone()
        spoilt[2, 5] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            fit(spoilt, Grid(4, 8), torch.bfloat16)
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        fit(w * 1e8, Grid(4, 8), torch.float16)
    for bits, group in ((1, 8), (9, 8), (4, -1)):
        with pytest.raises(ValueError, match="2 to 8 bits"):
            Grid(bits, group)


def test_many_rows_are_fitted_in_pieces() -> None:
    w = weight(3000, 256)
    scale, zero = fit(w, Grid(4, 32, symmetric=False), torch.bfloat16, search=True)
    for part in (slice(0, 5), slice(1020, 1030), slice(2990, 3000)):
        alone = fit(w[part], Grid(4, 32, symmetric=False), torch.bfloat16, search=True)
        assert torch.equal(scale[part], alone[0]) and torch.equal(zero[part], alone[1])
