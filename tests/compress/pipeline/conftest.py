"""A text, and runs on it with windows of a few tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact import Artifact
from compress.pipeline import compress
from compress.progress import Progress, silent
from compress.records import RunFacts
from tests.compress.pipeline.small_runs import FakeReport


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.fixture
def go(text: Path, tmp_path: Path) -> Callable[..., tuple[Artifact, RunFacts]]:
    """`go(model, recipe, **options)` runs with a fake report and small windows."""

    def run_it(
        model: Path,
        recipe: str | Path = "nf4",
        out: Path | None = None,
        progress: Progress = silent,
        failure: BaseException | None = None,
        **options: Any,
    ) -> tuple[Artifact, RunFacts]:
        report = FakeReport(failure)
        small = {"calib": str(text), "seq_len": 32, "eval_tokens": 64, "samples": 2} | options
        artifact = compress(model, recipe, out or tmp_path / "out", report=report, progress=progress, **small)
        return artifact, report.facts

    return run_it
