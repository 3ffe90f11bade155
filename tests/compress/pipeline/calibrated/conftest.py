"""A text, calibrated runs on it, and what their stages were shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.pipeline import compress, passes
from compress.records import RunFacts
from compress.stages import quantize
from tests.compress.pipeline.calibrated.watched import Spy


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.fixture
def go(text: Path, tmp_path: Path) -> Callable[..., tuple[Path, RunFacts]]:
    def run_it(model: Path, *wanted: dict[str, Any], out: str = "out", **options: Any) -> tuple[Path, RunFacts]:
        recipe = tmp_path / "own.yaml"
        recipe.write_text(json.dumps({"stages": list(wanted)}))
        kept: list[RunFacts] = []

        def report(facts: RunFacts, *rest: Any) -> dict[str, Any]:
            kept.append(facts)
            return {}

        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 3} | options
        compress(model, recipe, tmp_path / out, report=report, **small)
        return tmp_path / out, kept[0]

    return run_it


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Stands before the recipe's own stages."""
    found, make, work = Spy(), quantize.make_stages, passes.plan_blocks

    def kept(*given: Any) -> Any:
        found.tokens = given[3]
        return work(*given)

    monkeypatch.setattr(passes, "plan_blocks", kept)
    monkeypatch.setattr(passes, "make_stages", lambda *given: [found, *make(*given)])
    return found
