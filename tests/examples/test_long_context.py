"""examples/compare/long_context.py: a short run of the command, and what it says to a mistake."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner


def test_each_cache_has_a_row_for_each_width_and_number_of_threads(compare: Any, tmp_path: Path) -> None:
    app, file = compare("long_context").app, tmp_path / "rows.json"
    line = ["--shape", "pair", "--context", "200", "--widths", "1,3", "--rounds", "1", "--json", str(file)]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(file.read_text())["rows"]
    keys = [(row["cache"], row["width"], row["threads"]) for row in rows]
    assert sorted(keys) == sorted(product(("float32", "int8", "int4"), (1, 3), (1, 2)))
    assert all(row["step_ms"] > 0 for row in rows)
    # A page's last keys may stay empty.
    assert all(row["computed_mb"] <= row["cache_mb"] <= 1.3 * row["computed_mb"] for row in rows)
    held = {row["cache"]: row["cache_mb"] for row in rows}
    assert held["float32"] > 3 * held["int8"] > 4 * held["int4"]


def test_a_time_that_did_not_show_has_no_ratio(compare: Any) -> None:
    over = compare("long_context")._over
    assert over(0.3, 0.2) == pytest.approx(1.5)
    assert over(0.3, 0.0) is None and over(0.3, -0.1) is None and over(0.0, 0.2) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--shape", "gpt-7"], "--shape: expected one of"),
        (["--context", "40000"], "positions"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_mistakes_are_a_sentence(compare: Any, line: list[str], said: str) -> None:
    ran = CliRunner().invoke(compare("long_context").app, line)
    assert ran.exit_code == 2
    assert said in ran.output
    assert "Traceback" not in ran.output
