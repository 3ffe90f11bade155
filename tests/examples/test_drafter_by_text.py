"""examples/drafter_by_text.py: choosing a drafter beside each drafter alone, in trials that learn anew."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "drafter_by_text.py"))


@pytest.mark.parametrize("seed", range(4))
def test_there_are_beginnings_of_every_kind(example: dict[str, Any], seed: int) -> None:
    """A seed of 2 draws a module that has too few functions to begin with."""
    found = example["prompts"](5, seed)
    assert all(len(found[kind]) == 5 and all(found[kind]) for kind in example["KINDS"])


@pytest.mark.slow
def test_each_trial_counts(example: dict[str, Any]) -> None:
    small = ["--count", "1", "--new-tokens", "16", "--rounds", "1", "--trials", "2", "--drafters", "lookup,model"]
    result = CliRunner().invoke(example["app"], small)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"\d\.\d{3} to \d\.\d{3}", result.output)) == len(example["KINDS"]) + 1
    assert "0 texts differ" in result.output
