"""A run that is killed, at whatever instant, goes on to the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.killing import drive

INT4 = {"quantize": {"scheme": "int4", "group_size": 32}}
# One recipe of each kind of stage.
RECIPES: dict[str, dict[str, Any]] = {
    "rounded": {"stages": [INT4]},
    "calibrated": {"stages": [{"prune": {"method": "wanda", "sparsity": 0.5}}, INT4]},
    "gptq": {"stages": [{"quantize": {"scheme": "int4", "group_size": 32, "method": "gptq", "act_order": True}}]},
    "drifted": {"stages": [{"quantize": {"scheme": "int3", "group_size": 32, "method": "gptq", "drift": 1.0}}]},
    "learned": {
        "stages": [
            INT4,
            {"learn": {"training": {"tokens": 384, "batch": 4, "length": 16, "save_every": 2, "evaluate_every": 2}}},
        ]
    },
    "awq": {"stages": [{"quantize": {"scheme": "int4", "group_size": 32, "method": "awq"}}]},
    "smoothed": {"stages": [{"smooth": {"alpha": 0.5}}, {"quantize": {"scheme": "int8-static"}}]},
    "mixed": {"stages": [{"quantize": {"method": "sensitivity", "bits_per_weight": 4.8, "group_size": 32}}]},
    "sparse": {"stages": [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}]},
    "narrowed": {"stages": [{"prune": {"method": "width", "share": 0.25}}]},
    "shortened": {"stages": [{"prune": {"method": "depth", "share": 0.3}}]},
    "cached": {"kv": {"scheme": "int8"}},
    "healed": {
        "stages": [
            {"prune": {"method": "depth", "share": 0.3}},
            {"heal": {"training": {"tokens": 384, "batch": 4, "length": 16, "save_every": 2, "evaluate_every": 2}}},
            INT4,
        ]
    },
}


@pytest.fixture
def killed(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`killed("calibrated", points=[3])` is what the driver found."""

    def run(name: str, points: list[int] | str, moments: int = 0) -> dict[str, Any]:
        recipe, text, job = (tmp_path / file for file in ("own.yaml", "code.txt", "job.json"))
        recipe.write_text(json.dumps(RECIPES[name]))
        text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
        (tmp_path / "runs").mkdir()
        wanted = {"points": points, "random": moments, "seed": 0, "folder": str(tmp_path / "runs")}
        asked = {"model": str(tiny("llama")), "recipe": str(recipe), "text": str(text), **wanted}
        return drive("compress/pipeline/kill_driver.py", job, asked)

    return run


def check(found: dict[str, Any]) -> None:
    assert {"manifest.json", "recipe.yaml", "model/config.json"} <= set(found["files"])
    bad = [kill for kill in found["kills"] if not kill["same"]]
    assert not bad, f"{bad}\n{found['errors']}"


@pytest.mark.parametrize("name", [pytest.param("rounded", marks=pytest.mark.slow), "calibrated"])
def test_killed_at_some_write_boundaries(killed: Callable[..., dict[str, Any]], name: str) -> None:
    points = [1, 22, 37, 71, 90]
    found = killed(name, points)
    check(found)
    assert found["steps"] > 60
    assert all(kill["killed"] for kill in found["kills"])
    # The points lie before, in and after the pass over the blocks.
    left = [kill["left"] for kill in found["kills"]]
    assert any("part-00001.safetensors" in names for names in left if names)
    assert any("manifest.json" in names for names in left if names)
    assert any(names and "inputs-00001.bin" in names for names in left) == (name == "calibrated")


def test_killed_while_training(killed: Callable[..., dict[str, Any]]) -> None:
    found = killed("healed", [130])
    check(found)
    assert found["steps"] > 180
    assert all(kill["killed"] for kill in found["kills"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_killed_at_every_write_boundary_and_at_random(killed: Callable[..., dict[str, Any]], name: str) -> None:
    found = killed(name, "all", moments=15)
    check(found)
    assert len(found["kills"]) == found["steps"] + 15
