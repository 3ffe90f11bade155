"""How large float32 products of the calibration pass are computed on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def quick_products() -> Iterator[None]:
    """Lets oneDNN compute float32 matrix products within, where it keeps all of their factors' bits.

    torch leaves them to another library otherwise, which on some processors takes more than twice as long. The setting
    that brings oneDNN in also permits it to round factors to bfloat16, which it does on processors with units for such
    matrices (AMX): there products stay as they are, for what a block gives would be off by a percent.
    """
    if not _keeps_factors():
        yield
        return
    with _onednn():
        yield


@contextmanager
def _onednn() -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn  # whose annotations leave this setting out
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _keeps_factors() -> bool:
    """Whether a product under the setting is as near to the true one as float32 gets; true without oneDNN, too."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator) for shape in ((256, 512), (512, 256)))
    exact = left.double() @ right.double()
    with _onednn():
        found = (left @ right).double()
    # float32's rounding gives some 1e-7, bfloat16's 2e-3.
    return float((found - exact).norm() / exact.norm()) < 1e-5
