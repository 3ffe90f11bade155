"""Kernels for GPUs run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import pytest
import torch

from tests.interpreted import interpret

interpret()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU for interpreted kernels."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
