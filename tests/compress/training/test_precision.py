"""Training in bfloat16 where the processor multiplies it, and in float32 elsewhere; a recipe may ask for either."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.learn.stage import LearnTask
from compress.pipeline import compress
from compress.recipe import Recipe, built_in
from compress.training.precision import has_bfloat16

SAID = "no instructions that multiply bfloat16"


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_processor_has_it_by_its_instructions(monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert has_bfloat16("cpu") is (avx512 or amx)


def test_built_in_recipes_leave_it_to_the_processor() -> None:
    stages = [stage.trained for recipe in built_in() for stage in recipe.stages if stage.trained is not None]
    assert len(stages) >= 10 and {stage.training.autocast for stage in stages} == {"auto"}


@pytest.mark.parametrize(
    ("asked", "quick", "expected"), [("auto", True, True), ("auto", False, False), (True, False, True)]
)
def test_a_run_trains_so(
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool | str,
    quick: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr("compress.pipeline.passes.has_bfloat16", lambda device: quick)
    seen: list[bool] = []
    loss = LearnTask.loss

    def spied(self: LearnTask, *given: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return loss(self, *given)

    monkeypatch.setattr(LearnTask, "loss", spied)
    training = {"tokens": 256, "batch": 4, "length": 16, "evaluate_every": 2, "save_every": 2, "autocast": asked}
    stages: list[dict[str, Any]] = [
        {"quantize": {"scheme": "int4", "group_size": 32}},
        {"learn": {"training": training}},
    ]
    recipe = Recipe.model_validate({"name": "own", "stages": stages})
    notes: list[str] = []
    compress(tiny("llama"), recipe, tmp_path / "run", samples=2, seq_len=32, report=lambda *_: {}, note=notes.append)
    assert seen and set(seen) == {expected}
    assert any(SAID in note for note in notes) == (asked == "auto" and not quick)
