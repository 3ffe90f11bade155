"""A model that the stage `rotate` has turned is compared with its original turned alike, and damage is still seen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.check.check import Text, check
from compress.check.findings import Result
from compress.pipeline import compress
from compress.recipe import Recipe
from tests.compress.check import planted

Tiny = Callable[..., Path]


def said(result: Result, level: str) -> str:
    return " | ".join(finding.sentence for finding in result.findings if finding.level == level)


@pytest.mark.parametrize("packed", [False, True])
def test_rotated_weights_are_compared_with_the_originals_turned_alike(packed: bool, tiny: Tiny, tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [{"rotate": {}}]
    stages += [{"quantize": {"scheme": "int4", "group_size": 32, "method": "rtn", "search": True}}] if packed else []
    recipe = Recipe.model_validate({"name": "own", "stages": stages})
    original = tiny("llama")
    model = compress(original, recipe, tmp_path / "run", samples=1, seq_len=32, report=lambda *_: None).model
    result = check(model, original, Text(tokens=32))
    assert result.level == "good", said(result, "broken") + said(result, "suspicious")
    assert "after the same rotation" in said(result, "note")
    assert result.depth is not None and max(result.depth.own) < (0.3 if packed else 1e-3)
    if not packed:
        assert max(weight.error or 0.0 for weight in result.weights) < 1e-3

    # Damage is seen; and a model that does not say that it is rotated is taken for another one.
    broken, unsaid = (Path(shutil.copytree(model, tmp_path / name)) for name in ("broken", "unsaid"))
    planted.change(broken, lambda tensors: planted.put(tensors, "model.norm.weight", lambda weight: weight * 3))
    assert "model.norm.weight" in said(check(broken, original), "broken")
    planted.configure(unsaid, lambda config: config.pop("specpress"))
    assert check(unsaid, original).level != "good"


def test_a_packed_original_is_not_turned_and_that_is_said(tiny: Tiny, tmp_path: Path) -> None:
    def run(name: str, *stages: dict[str, Any]) -> Path:
        recipe = Recipe.model_validate({"name": "own", "stages": stages})
        return compress(tiny("qwen2"), recipe, tmp_path / name, samples=1, seq_len=32, report=lambda *_: None).model

    packed = run("packed", {"quantize": {"scheme": "int8-dynamic"}})
    result = check(run("rotated", {"rotate": {"residual": False}}), packed)
    assert "the original's weights are packed" in said(result, "suspicious")
