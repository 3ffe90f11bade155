"""kernels/exact.py: right against float64, and the same bits wherever a row lies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels import exact


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40))
def test_exp_is_within_two_units_in_the_last_place(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    want = torch.exp(x.clamp(max=88.3).double())
    got = exact.exp(x).double()
    normal = x >= -87.0
    assert ((got - want).abs()[normal] <= 2 * 2.0**-23 * want[normal]).all()
    assert (got[~normal] < 1e-37).all()


def test_exp_of_minus_infinity_is_zero_and_of_zero_is_one() -> None:
    assert exact.exp(torch.tensor([float("-inf"), 0.0])).tolist() == [0.0, 1.0]


def test_elementwise_bits_do_not_depend_on_the_place() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 5
    for function in (exact.exp, exact.sigmoid, exact.tanh):
        whole = function(x)
        assert all(torch.equal(function(x[i : i + 1]), whole[i : i + 1]) for i in range(0, 1000, 7))


@pytest.mark.parametrize("size", [1, 2, 3, 37, 64, 512])
def test_tree_sum(size: int) -> None:
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    assert torch.allclose(exact.tree_sum(x).double(), x.double().sum(-1), atol=1e-5)
    assert torch.equal(exact.tree_sum(x)[4:5], exact.tree_sum(x[4:5]))


@pytest.mark.parametrize(("outputs", "inputs"), [(37, 100), (128, 512), (512, 1536), (7, 3), (4096, 512)])
def test_product_rows_have_the_same_bits_at_every_width(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(33, inputs, generator=generator)
    padded = exact.lay_out(weight)
    whole = exact.product(x, padded)
    assert torch.allclose(whole.double(), x.double() @ weight.double().t(), atol=1e-3)
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 16):
        for start in (0, 5, 33 - width):
            assert torch.equal(exact.product(x[start : start + width], padded), whole[start : start + width])


def test_the_library_alone_would_not_keep_the_bits() -> None:
    """The positive of the test above: without tiles, torch's own product changes a row's bits with the width."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 1536, generator=generator), torch.randn(64, 1536, generator=generator)
    whole = x @ weight.t()
    if all(torch.equal(x[:w] @ weight.t(), whole[:w]) for w in range(1, 64)):
        pytest.skip("this machine's library happens to keep them")


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(8, 64, 6), (24, 64, 10), (16, 10, 64), (8, 64, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_batched_products_have_the_same_bits_at_every_place_of_every_tile(
    rows: int, inputs: int, outputs: int, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    row, weight = torch.randn(inputs, generator=generator), torch.randn(inputs, outputs, generator=generator)
    found, theirs = [], []
    for tiles, blocks in ((1, 1), (3, 2), (17, 4)):
        x = torch.randn(tiles, 1, 2, rows, inputs, generator=generator)
        weights = torch.randn(tiles, blocks, 2, inputs, outputs, generator=generator)
        weights[-1, -1, 1] = weight
        if transposed and blocks > 1:
            weights = weights.mT.contiguous().mT
        for place in range(rows):
            x[-1, 0, 1, place] = row
            found.append(exact.batched_product(x, weights)[-1, -1, 1, place])
            theirs.append(torch.matmul(x, weights)[-1, -1, 1, place])
    assert torch.allclose(found[0].double(), row.double() @ weight.double(), atol=1e-4)
    assert all(torch.equal(one, found[0]) for one in found)
    if (rows, outputs) == (8, 6) and all(torch.equal(one, theirs[0]) for one in theirs):
        pytest.skip("this machine's library happens to keep them by itself")
