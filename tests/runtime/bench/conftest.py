"""The device of the GPU's benchmarks: CUDA where there is one, else a CPU on which Triton's kernels are interpreted."""

import os

import pytest
import torch

# Triton asks for its interpreter when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """What `gpu --device` takes."""
    return "cuda" if torch.cuda.is_available() else "cpu"
