"""How the tests import the modules of examples/compare."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COMPARE = Path(__file__).parents[2] / "examples" / "compare"


@pytest.fixture(scope="module")
def compare() -> Any:
    """Imports a module of the example, which are no package: their folder is the script's, as Python has it."""
    before = set(sys.modules)

    def get(name: str) -> ModuleType:
        return __import__(name)

    sys.path.insert(0, str(COMPARE))
    try:
        yield get
    finally:
        sys.path.remove(str(COMPARE))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(COMPARE):
                del sys.modules[name]
