"""A packed model that heads are trained for."""

from pathlib import Path

import pytest

from compress.pipeline import compress
from compress.recipe import Recipe
from runtime import Model, load
from tests.compress.medusa.packing import PACKING, UNTIED, Tiny


@pytest.fixture(scope="module")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder: a tiny llama at int8, whose text is no repetition of one token (its head is its own)."""
    out = tmp_path_factory.mktemp("medusa") / "run"
    recipe = Recipe.load("int8-dynamic")
    return compress(tiny("llama", **UNTIED), recipe, out, **PACKING).model.parent


@pytest.fixture(scope="module")
def target(packed: Path) -> Model:
    return load(packed)
