"""The reference's product of int8 is exact on every processor, also at the ends of the range, where sums saturate."""

import pytest
import torch

from runtime.kernels.reference import integer_product


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (3, 128, 64), (8, 1024, 30), (17, 4100, 12)])
@pytest.mark.parametrize("lowest", [-128, 120])
def test_products_are_exact(rows: int, inputs: int, outputs: int, lowest: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randint(max(lowest, -127), 128, (rows, inputs), generator=generator).to(torch.int8)
    codes = torch.randint(lowest, 128, (inputs, outputs), generator=generator).to(torch.int8)
    found = integer_product(x, codes)
    assert found.dtype == torch.int32 and torch.equal(found.double(), x.double() @ codes.double())
