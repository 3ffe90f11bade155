"""What tests of all formats measure."""

from collections.abc import Callable

import pytest
import torch

from runtime.formats import to_tensors
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import tensor_bytes


@pytest.fixture(scope="session")
def bits_per_weight() -> Callable[[PackedWeight], float]:
    """Bits that a layer's tensors take over its weights: all that is stored but the bias."""
    return lambda packed: 8 * tensor_bytes(to_tensors(packed, "layer", torch.bfloat16)) / packed.codes.numel()
