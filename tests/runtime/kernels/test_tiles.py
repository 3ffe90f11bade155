"""kernels/tiles.py: right against float64, and the same bits wherever a row lies."""

import pytest
import torch

from runtime.kernels import tiles


@pytest.mark.parametrize(("outputs", "inputs"), [(37, 100), (128, 512), (512, 1536), (7, 3), (4096, 512)])
def test_product_rows_have_the_same_bits_at_every_width(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(33, inputs, generator=generator)
    padded = tiles.lay_out(weight)
    whole = tiles.product(x, padded)
    assert torch.allclose(whole.double(), x.double() @ weight.double().t(), atol=1e-3)
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 16):
        for start in (0, 5, 33 - width):
            assert torch.equal(tiles.product(x[start : start + width], padded), whole[start : start + width])


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
    for count, blocks in ((1, 1), (3, 2), (17, 4)):
        x = torch.randn(count, 1, 2, rows, inputs, generator=generator)
        weights = torch.randn(count, blocks, 2, inputs, outputs, generator=generator)
        weights[-1, -1, 1] = weight
        if transposed and blocks > 1:
            weights = weights.mT.contiguous().mT
        for place in range(rows):
            x[-1, 0, 1, place] = row
            found.append(tiles.batched_product(x, weights)[-1, -1, 1, place])
            theirs.append(torch.matmul(x, weights)[-1, -1, 1, place])
    assert torch.allclose(found[0].double(), row.double() @ weight.double(), atol=1e-4)
    assert all(torch.equal(one, found[0]) for one in found)
    if (rows, outputs) == (8, 6) and all(torch.equal(one, theirs[0]) for one in theirs):
        pytest.skip("this machine's library happens to keep them by itself")
