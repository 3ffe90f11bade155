"""The same tests run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's own switch; it is looked at when a kernel is decorated.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run; skips where Triton is not installed."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
