"""Medusa heads and a block drafter beside a rotated target: trained on its rotated states, and no text differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.pipeline import compress
from compress.recipe import Recipe
from runtime import Speculator, load
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import rotation_of
from runtime.speculative.drafters.by_name import drafter_by_name

Tiny = Callable[..., Path]
TRAINING = {"tokens": 2 * 8 * 24, "batch": 8, "length": 24}
STAGES: dict[str, dict[str, Any]] = {
    "medusa": {"medusa": {"heads": 2, "samples": 64, "nodes": 6, "continuations": "none", "training": TRAINING}},
    "block": {
        "block_draft": {
            "draft_length": 3,
            "samples": 64,
            "anchors": 2,
            "continuations": "none",
            "training": TRAINING,
        }
    },
}
GRID = {"scheme": "int4", "group_size": 32}
TRELLIS = {"scheme": "trellis-4", "method": "gptq", "fold": False}


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [GRID, TRELLIS])
@pytest.mark.parametrize("kind", STAGES)
def test_heads_are_trained_on_a_rotated_target(kind: str, quantize: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    stages = [{"rotate": {}}, {"quantize": quantize}, STAGES[kind]]
    recipe = Recipe.model_validate({"name": "own", "stages": stages})
    options: dict[str, Any] = {"samples": 2, "seq_len": 32, "threads": 1, "report": lambda *_: None}
    run = compress(tiny("llama"), recipe, tmp_path / "run", **options)
    assert rotation_of(open_checkpoint(run.model).config) is not None and (run.path / kind).is_dir()
    target = load(run.path)
    drafter = drafter_by_name(target, kind).drafter
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, 300, (3, 9), generator=generator).tolist()
    plain = Speculator(target, None).generate(prompts, 24, stop=())
    drafted = Speculator(target, drafter, 3).generate(prompts, 24, stop=())
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert sum(one.metrics.drafted for one in drafted) > 0
