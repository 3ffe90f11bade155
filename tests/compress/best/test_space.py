"""What a unit may become is what a run makes of it."""

from pathlib import Path

import pytest

from compress.best.space import KEEP, OPTIONS, find_units, make_recipe
from compress.model.plan import make_plan
from compress.model.source import open_sources
from compress.model.structure import read_structure
from tests.compress.tiny_architectures import make


@pytest.mark.parametrize("kind", ["llama", "mamba2", "lfm2", "falcon_h1"])
def test_a_run_takes_every_option_that_is_offered(kind: str, tmp_path: Path) -> None:
    """Mamba's output layers, for one, can be int8 and no packed integers."""
    make(kind, tmp_path / kind)
    source, _ = open_sources(str(tmp_path / kind), None)
    structure = read_structure(source.path)
    units = find_units(source.shapes(), structure)
    offered = set()
    for option in OPTIONS[1:]:
        chosen = {unit.name: option if option in unit.options else KEEP for unit in units}
        wanted = {layer: option.scheme for unit in units if not chosen[unit.name].keeps for layer in unit.layers}
        if not wanted:
            continue
        offered.add(option.scheme)
        plan = make_plan(source.shapes(), structure, make_recipe(units, chosen, "", {}).quantize)
        assert {layer.module: layer.scheme for layer in plan.layers.values()} == wanted
    assert {"int8-dynamic", "int4", "trellis-3"} <= offered
    left = [unit for unit in units if not any(one.scheme == "int4" for one in unit.options)]
    assert bool(left) == (kind == "mamba2"), [unit.name for unit in left]
