"""kernels/fused.py: fused multiply-adds against fractions, which round once by themselves."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.kernels.fused import fused_sum, product

N = 257


def once(value: Fraction) -> float:
    """The float32 number nearest to a fraction, the even one of two."""
    if value == 0:
        return 0.0
    exponent = max(abs(value.numerator).bit_length() - value.denominator.bit_length() - 1, -126)
    exponent += abs(value) >= Fraction(2) ** (exponent + 1)
    unit = Fraction(2) ** (exponent - 23)
    return float(round(value / unit) * unit)


def by_fractions(left: Tensor, right: Tensor) -> Tensor:
    """`fused_sum` of (K, n) numbers each."""
    found = []
    for column in range(left.shape[1]):
        total = 0.0
        for a, b in zip(left[:, column].tolist(), right[:, column].tolist(), strict=True):
            total = once(Fraction(total) + Fraction(a) * Fraction(b))
        found.append(total)
    return torch.tensor(found, dtype=torch.float64).float()


def drawn(seed: int, steps: int, spread: int, bits: int = 24) -> Tensor:
    """(steps, N) float32 numbers of that many bits and of sizes 2^±spread."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-(1 << bits), (1 << bits) + 1, (steps, N)).astype(np.float64)
    return torch.from_numpy((whole * 2.0 ** rng.integers(-spread, spread + 1, (steps, N))).astype(np.float32))


@pytest.mark.parametrize("bits", [24, 8, 3])
@pytest.mark.parametrize("spread", [0, 12, 30])
def test_sums_are_rounded_once_a_step(bits: int, spread: int) -> None:
    left, right = drawn(1, 12, spread, bits), drawn(2, 12, spread)
    assert torch.equal(fused_sum(left, right), by_fractions(left, right))


def test_sums_that_float64_rounds_to_a_middle() -> None:
    """1 + 2^-24 lies halfway between two floats, and what float64 cuts off decides: in the middle of a chunk, too."""
    e = 2.0**-12
    # 2^-24 and a bit that float64 cuts off: (1 + e)(1 − e + e²) = 1 + e³.
    more = (e * (1 + e), e * (1 - e + e * e))
    steps = [(1.0, 1.0), more, (1.0, 0.5), (1.0, -0.5), (2.0**-40, 2.0**-40), more, (1.0, 3.0)]
    # As often in a column beside others, each of which goes on from its own mended sum.
    columns = [steps, [(-a, b) for a, b in steps], [(1.0, 2.0)] * len(steps), steps[2:] + steps[:2]]
    pairs = torch.tensor(columns, dtype=torch.float64).float().transpose(0, 1)
    left, right = pairs[..., 0], pairs[..., 1]
    assert torch.equal(fused_sum(left, right), by_fractions(left, right))
    # The positive: rounded twice it would be another number.
    assert float(fused_sum(left[:2], right[:2])[0]) == 1 + 2.0**-23
    assert float((1.0 + left[1].double() * right[1].double()).float()[0]) == 1.0


def test_numbers_below_the_least_normal_one() -> None:
    left, right = drawn(3, 8, 3, 20) * 2.0**-90, drawn(4, 8, 3, 20) * 2.0**-75
    found = fused_sum(left, right)
    assert torch.equal(found, by_fractions(left, right)) and (found.abs() < 2.0**-126).any() and (found != 0).any()
    # A subnormal number, half a unit of the last place, and a bit that float64 cuts off.
    left = torch.tensor([[2.0**-127 + 2.0**-148], [2.0**-75 * (1 + 2.0**-23)]])
    right = torch.tensor([[1.0], [2.0**-75 * (1 - 2.0**-23)]])
    assert torch.equal(fused_sum(left, right), by_fractions(left, right))


def test_infinities_and_nan_are_kept() -> None:
    left, right = torch.tensor([[1.0, 3e38, float("inf"), float("nan")]] * 2), torch.tensor([[2.0, 3e38, 0.0, 1.0]] * 2)
    found = fused_sum(left, right)
    assert found[:2].tolist() == [4.0, float("inf")] and found[2:].isnan().all()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 5, 7), (1, 1, 1), (3, 40, 33), (70, 9, 1100)])
def test_products(rows: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(inputs, outputs, generator=generator)
    found = product(x, weight)
    assert found.shape == (rows, outputs) and torch.allclose(found.double(), x.double() @ weight.double(), atol=1e-4)
    for row in range(min(rows, 2)):
        pairs = x[row].unsqueeze(1).expand(-1, outputs), weight
        assert torch.equal(found[row, :33], by_fractions(*(part[:, :33] for part in pairs)))
        assert torch.equal(product(x[row : row + 1], weight)[0], found[row])
