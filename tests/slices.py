"""Cases of long tests, of which some run every time and the others in the slow suite."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def often(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases where there is a GPU; elsewhere, where Triton's interpreter takes seconds for one, others are slow."""
    quick = torch.cuda.is_available()
    return [case if quick or case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
