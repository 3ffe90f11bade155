"""examples/useless_heads.py: what drafters that are never right cost, turn by turn beside plain decoding."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "useless_heads.py"))


def test_a_turn_in_which_the_machine_was_elsewhere_counts_little(example: dict[str, Any]) -> None:
    taken, over = example["Taken"], example["_over"]
    plain = [taken(1.0, 1.0)] * 99
    slow = [taken(1.1, 1.0)] * 99
    assert over(slow, plain, lambda one: one.seconds) == pytest.approx(1.1)
    assert over(slow, plain, lambda one: one.processor) == pytest.approx(1.0)
    away = [*slow, taken(900.0, 1.0)], [*plain, taken(1.0, 1.0)]
    assert over(*away, lambda one: one.seconds) == pytest.approx((1.1**99 * example["MOST"]) ** 0.01)
    assert over(*reversed(away), lambda one: one.seconds) == pytest.approx(1 / over(*away, lambda one: one.seconds))


def test_each_drafter_has_a_row(example: dict[str, Any]) -> None:
    small = ["--count", "1", "--new-tokens", "40", "--rounds", "1", "--kinds", "oracle,medusa", "--threads", "1"]
    result = CliRunner().invoke(example["app"], small)
    assert result.exit_code == 0, result.output
    rows = dict(re.findall(r"(oracle|medusa)((?: *│ *[+-][\d.]+ %){3})", result.output))
    assert rows.keys() == {"oracle", "medusa"}
