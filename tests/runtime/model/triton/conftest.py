"""The device of these tests: CUDA where there is one, else a CPU on which Triton's kernels are interpreted.

Without Triton there is nothing to test.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreted import interpret

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
interpret()


@pytest.fixture(scope="session")
def device() -> str:
    """What `load` takes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def small(tiny: Callable[..., Path]) -> Callable[..., Path]:
    """tiny, with the fewest heads: a row costs the interpreter a tenth of a second for each layer otherwise."""

    def get(kind: str, **changes: Any) -> Path:
        return tiny(kind, **({"num_attention_heads": 2, "num_key_value_heads": 1} | changes))

    return get


@pytest.fixture(scope="session")
def longer(device: str) -> int:
    """How many times as long texts are where kernels are compiled."""
    return 10 if device == "cuda" else 1
