"""How large float32 products of the calibration pass are computed on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quick_products() -> Iterator[None]:
    """Lets oneDNN compute float32 matrix products within.

    torch leaves them to another library otherwise, which on some processors takes more than twice as long. On
    processors with units for bfloat16 matrices oneDNN may round the factors to bfloat16, as torch does wherever this
    setting is made; sums stay in float32. That is good enough for statistics of activations, and not for GPTQ's own
    arithmetic.
    """
    mkldnn: Any = torch.backends.mkldnn  # whose annotations leave this setting out
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
