"""The device of these tests: CUDA where there is one, else a CPU on which Triton's kernels are interpreted.

Triton asks for its interpreter when a kernel is defined, so the switch is thrown here, before anything imports one.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """What `load` takes."""
    return "cuda" if torch.cuda.is_available() else "cpu"
