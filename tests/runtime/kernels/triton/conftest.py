"""Kernels for GPUs run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

# Triton decides when a kernel is defined, so before any is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU for interpreted kernels."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
