"""A plan that is killed, at whatever instant, goes on to the same plan and the same bytes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.killing import drive

Drive = Callable[..., dict[str, Any]]


@pytest.fixture
def killed(tiny: Callable[..., Path], tmp_path: Path) -> Drive:
    """`killed("size", chain=3)` is what the driver found."""

    def run(goal: str, wanted: int = 2, steps: int = 0, moments: int = 0, chain: int = 0) -> dict[str, Any]:
        text, job = tmp_path / "code.txt", tmp_path / "job.json"
        drawn = random.Random(0)
        text.write_text(
            "\n".join(f"def f{i}(value):\n    return value * {drawn.randrange(99)} + {i}" for i in range(300))
        )
        asked = {"goal": goal, "kl": 0.2, "wanted": wanted, "text": str(text)}
        points = {"steps": steps, "moments": moments, "chain": chain}
        (tmp_path / "plans").mkdir()
        model = {"model": str(tiny("llama")), "folder": str(tmp_path / "plans")}
        return drive("compress/best/kill_driver.py", job, {**model, **asked, **points})

    return run


def check(found: dict[str, Any], kills: int) -> None:
    bad = [kill for kill in found["kills"] if kill["wrong"]]
    assert not bad, f"{bad}\n{found['errors']}"
    assert len(found["kills"]) == kills and found["steps"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("chain", [1, 3])
def test_killed_and_resumed(killed: Drive, chain: int) -> None:
    found = killed("size", wanted=1, chain=chain)
    check(found, 1)
    assert found["kills"][0]["killed"]


@pytest.mark.slow
def test_killed_at_twenty_points(killed: Drive) -> None:
    found = killed("size", steps=14, moments=6)
    check(found, 20)
    assert sum(kill["killed"] for kill in found["kills"]) >= 18
    # Before anything was measured, between candidates, and when all was.
    assert {kill["measured"] for kill in found["kills"]} >= {0, 1, 2}


@pytest.mark.slow
def test_what_is_fastest_follows_from_the_journal(killed: Drive) -> None:
    check(killed("speed", steps=6, moments=2), 8)
