"""The device of the GPU's benchmarks: CUDA where there is one, else a CPU on which Triton's kernels are interpreted."""

import pytest
import torch

from tests.interpreted import interpret

interpret()


@pytest.fixture(scope="session")
def device() -> str:
    """What `gpu --device` takes."""
    return "cuda" if torch.cuda.is_available() else "cpu"
