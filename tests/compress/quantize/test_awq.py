"""AWQ's searches against brute force in float64, and below rounding alone where a channel stands out."""

import pytest
import torch
from torch import Tensor

from compress.quantize import awq
from compress.quantize.grid import Grid, decode, encode, fit

DTYPE = torch.bfloat16
INT4 = Grid(4, 16, True)
GRIDS = [INT4, Grid(4, 16, False), Grid(3, 16, True), Grid(4, 0, True), Grid(2, 16, False)]


def outlier_inputs(tokens: int = 400, channels: int = 64, seed: int = 0) -> Tensor:
    """Rows with correlated channels, four of which are twenty times the others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(channels) + 0.2 * torch.randn(channels, channels, generator=generator)
    rows = torch.randn(tokens, channels, generator=generator) @ mix
    rows[:, ::16] *= 20
    return rows


def random_weight(outputs: int, channels: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(outputs, channels, generator=torch.Generator().manual_seed(seed)) * 0.1


def hessian(rows: Tensor) -> Tensor:
    return (rows.T @ rows) / len(rows)


def rounded(weight: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    scale, zero = fit(weight * factor, grid, DTYPE)
    return decode(encode(weight * factor, scale, zero, grid), scale, zero, grid) / factor


def brute_error(weight: Tensor, other: Tensor, rows: Tensor) -> float:
    """The mean over tokens of the squared output error, from the rows themselves."""
    return float((rows.double() @ (weight.double() - other.double()).T).square().sum(dim=1).mean())


@pytest.mark.parametrize("grid", GRIDS)
def test_the_hessian_judges_as_the_rows_do(grid: Grid) -> None:
    rows, weight = outlier_inputs(), random_weight(24)
    layer = awq.Fed(weight, hessian(rows), grid)
    other = rounded(weight, torch.ones(64), grid)
    assert awq.output_error(layer, other) == pytest.approx(brute_error(weight, other, rows), rel=1e-4)
    by_output = torch.arange(24.0)
    weighted = (rows.double() @ (weight - other).double().T).square().mean(dim=0) @ by_output.double()
    assert awq.output_error(awq.Fed(weight, hessian(rows), grid, by_output), other) == pytest.approx(
        float(weighted), rel=1e-4
    )


@pytest.mark.parametrize("grid", GRIDS)
def test_the_search_is_at_least_as_good_as_the_papers_lines_by_brute_force(grid: Grid) -> None:
    rows = outlier_inputs()
    weights = [random_weight(24), random_weight(40, seed=2)]
    absmean = rows.abs().mean(dim=0)
    found = awq.search_scale([awq.Fed(w, hessian(rows), grid) for w in weights], absmean, DTYPE)

    def judged(factor: Tensor) -> float:
        return sum(brute_error(w, rounded(w, factor, grid), rows) for w in weights)

    groups = torch.cat(weights).abs().view(64, -1, grid.group_size or 64)
    relative = (groups / groups.amax(dim=-1, keepdim=True)).view(64, 64).mean(dim=0)
    lines = [absmean ** (a / 20) / w for a in range(21) for w in (1.0, relative ** (1 - a / 20))]
    best = min(judged(s / (s.max() * s.min()).sqrt()) for s in lines)
    plain = judged(torch.ones(64))
    assert judged(found) <= best * 1.001 and judged(found) <= plain


def gains(weight: Tensor, factor: Tensor, rows: Tensor, most: float = 1.0) -> bool:
    """Whether the factor makes the error of int4 less, or at most so many times what it is without."""
    found, plain = (brute_error(weight, rounded(weight, one, INT4), rows) for one in (factor, torch.ones(64)))
    return found < most * plain or found == plain == 0


@pytest.mark.parametrize("grid", GRIDS)
def test_outlier_channels_cost_awq_less_than_rounding_alone(grid: Grid) -> None:
    rows, weight = outlier_inputs(), random_weight(64)
    found = awq.search_scale([awq.Fed(weight, hessian(rows), grid)], rows.abs().mean(dim=0), DTYPE)
    plain = brute_error(weight, rounded(weight, torch.ones(64), grid), rows)
    assert brute_error(weight, rounded(weight, found, grid), rows) < 0.75 * plain
    # On other rows of the same kind as well.
    fresh = outlier_inputs(seed=0, tokens=900)[400:]
    plain = brute_error(weight, rounded(weight, torch.ones(64), grid), fresh)
    assert brute_error(weight, rounded(weight, found, grid), fresh) < 0.8 * plain


def test_without_outliers_the_factor_never_makes_it_worse() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(300, 64, generator=generator)
    weight = random_weight(32)
    found = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE)
    assert gains(weight, found, rows, most=1.001)


def test_a_sample_of_the_outputs_judges_nearly_as_well_as_all() -> None:
    rows, weight = outlier_inputs(), random_weight(512)
    layer, absmean = awq.Fed(weight, hessian(rows), INT4), rows.abs().mean(dim=0)
    whole = awq.search_scale([layer], absmean, DTYPE, judges=512)
    part = awq.search_scale([layer], absmean, DTYPE, judges=64)
    errors = [brute_error(weight, rounded(weight, one, INT4), rows) for one in (part, whole, torch.ones(64))]
    assert errors[0] <= 1.06 * errors[1] < 0.7 * errors[2]


def test_importance_moves_the_choice_to_the_layer_that_matters() -> None:
    rows, other_rows = outlier_inputs(), outlier_inputs(seed=7).roll(5, dims=1)
    absmean = (rows.abs().mean(dim=0) + other_rows.abs().mean(dim=0)) / 2
    weights = [random_weight(32), random_weight(32, seed=2)]

    def own_errors(shares: tuple[float, float]) -> tuple[float, float]:
        layers = [
            awq.Fed(weights[0], hessian(rows), INT4, shares[0]),
            awq.Fed(weights[1], hessian(other_rows), INT4, shares[1]),
        ]
        factor = awq.search_scale(layers, absmean, DTYPE)
        return (
            brute_error(weights[0], rounded(weights[0], factor, INT4), rows),
            brute_error(weights[1], rounded(weights[1], factor, INT4), other_rows),
        )

    first, second = own_errors((1.0, 0.0)), own_errors((0.0, 1.0))
    assert first[0] < second[0] and second[1] < first[1]


def test_tied_channels_get_one_factor() -> None:
    rows, weight = outlier_inputs(), random_weight(32)

    def tie(statistic: Tensor) -> Tensor:
        return statistic.view(2, 32).mean(dim=0).repeat(2)

    found = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE, tie=tie)
    assert torch.equal(found[:32], found[32:])
    assert gains(weight, found, rows) and found.max() > 1.1


def test_larger_inputs_everywhere_change_nothing() -> None:
    rows, weight = outlier_inputs(), random_weight(32)
    one = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE)
    rows = rows * 64
    other = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


def test_dead_and_constant_channels_are_no_obstacle() -> None:
    rows, weight = outlier_inputs(), random_weight(32)
    rows[:, 5] = 0
    rows[:, 9] = 0.25
    weight[:, 11] = 0
    found = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE)
    assert bool((torch.isfinite(found) & (found > 0)).all())
    assert gains(weight, found, rows)
    # A dead channel is scaled as the smallest live one, never up.
    assert found[5] <= found.median()
    nothing = awq.search_scale([awq.Fed(weight, torch.zeros(64, 64), INT4)], torch.zeros(64), DTYPE)
    assert torch.equal(nothing, torch.ones(64))


def test_a_constant_layer_and_a_layer_of_zeros_pass() -> None:
    rows = outlier_inputs()
    for weight in (torch.zeros(8, 64), torch.full((8, 64), 0.5)):
        found = awq.search_scale([awq.Fed(weight, hessian(rows), INT4)], rows.abs().mean(dim=0), DTYPE)
        assert gains(weight, found, rows, most=1.001) and bool(torch.isfinite(found).all())
        scale, zero = awq.search_clip(weight, hessian(rows), INT4, DTYPE)
        assert bool(torch.isfinite(scale).all() and (scale > 0).all()) and bool(torch.isfinite(zero).all())


@pytest.mark.parametrize("where", ["absmean", "hessian", "weight"])
def test_nan_is_refused(where: str) -> None:
    rows = outlier_inputs()
    values = {"absmean": rows.abs().mean(dim=0), "hessian": hessian(rows), "weight": random_weight(8)}
    awq.search_scale([awq.Fed(values["weight"], values["hessian"], INT4)], values["absmean"], DTYPE)
    values[where].view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        awq.search_scale([awq.Fed(values["weight"], values["hessian"], INT4)], values["absmean"], DTYPE)
    if where != "absmean":
        with pytest.raises(ValueError, match="NaN"):
            awq.search_clip(values["weight"], values["hessian"], INT4, DTYPE)


def test_statistics_of_another_width_are_refused() -> None:
    rows = outlier_inputs()
    with pytest.raises(ValueError, match="64 inputs"):
        awq.search_scale([awq.Fed(random_weight(8), hessian(rows), INT4)], torch.ones(32), DTYPE)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_clip_search_finds_each_groups_best_scale(grid: Grid) -> None:
    rows, weight = outlier_inputs(), random_weight(16)
    weight[:, 20] *= 4
    shrinks = (1.05, 1.0, 0.9, 0.8, 0.7, 0.6)
    scale, zero = awq.search_clip(weight, hessian(rows), grid, DTYPE, shrinks)
    full, zero_full = fit(weight, grid, DTYPE)
    assert torch.equal(zero, zero_full)
    width = grid.group_size or 64

    def by_group(tried: Tensor) -> Tensor:
        """(N, G) squared error of each group's own share of the output, from the rows."""
        error = (weight - decode(encode(weight, tried, zero, grid), tried, zero, grid)).double()
        shares = error.view(16, -1, width)
        return torch.einsum("tgk,ngk->tng", rows.double().view(len(rows), -1, width), shares).square().mean(dim=0)

    tried = torch.stack([by_group((full * shrink).to(DTYPE).float()) for shrink in shrinks])
    torch.testing.assert_close(by_group(scale), tried.amin(dim=0), rtol=1e-3, atol=1e-9)
    assert bool((scale < full).any())


def test_a_group_whose_inputs_are_dead_is_not_clipped() -> None:
    rows, weight = outlier_inputs(), random_weight(16)
    rows[:, 16:32] = 0
    scale, _ = awq.search_clip(weight, hessian(rows), INT4, DTYPE)
    full, _ = fit(weight, INT4, DTYPE)
    assert torch.equal(scale[:, 1], full[:, 1]) and not torch.equal(scale, full)


@pytest.mark.parametrize("grid", [Grid(3, 16, True), Grid(2, 16, True), Grid(4, 0, True)])
def test_clipping_pays_where_a_weight_stands_out(grid: Grid) -> None:
    rows, weight = outlier_inputs(), random_weight(16)
    weight[:, 20] *= 4
    scale, zero = awq.search_clip(weight, hessian(rows), grid, DTYPE)
    clipped = decode(encode(weight, scale, zero, grid), scale, zero, grid)
    plain = rounded(weight, torch.ones(64), grid)
    assert brute_error(weight, clipped, rows) < 0.9 * brute_error(weight, plain, rows)
