"""What a run says while it works: steps, and the time that is left."""

import io
import re
from pathlib import Path

import pytest

import compress
from compress.progress import Lines, title_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which is its last entry."""
    times = [100.0]
    monkeypatch.setattr("compress.progress.time.monotonic", lambda: times[-1])
    return times


def test_what_is_left_follows_from_the_later_steps(clock: list[float]) -> None:
    """Three parts that take no time, and blocks of 100 s."""
    out = io.StringIO()
    lines = Lines(out)
    said = []
    for done in range(26):
        lines("quantize", done, 25)
        said.append(out.getvalue().splitlines()[-1])
        clock.append(clock[-1] + (1 if done < 3 else 100))
    assert said[0] == "Working on weights …"
    # 17 steps are left of 8, of which the last four took 100 s each.
    assert said[8] == "Working on weights: 8 of 25, about 28 min left"
    assert said[24] == "Working on weights: 24 of 25, about 100 s left"
    assert said[25].startswith("Working on weights: done in ")


def test_a_stage_that_goes_on_counts_from_where_it_is(clock: list[float]) -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines("quantize", 10, 20)
    clock.append(clock[-1] + 60)
    lines("quantize", 11, 20)
    assert out.getvalue().splitlines()[-1] == "Working on weights: 11 of 20, about 9 min left"
    for done in (12, 13):
        clock.append(clock[-1] + 60)
        lines("quantize", done, 20)
    # Nothing is known of the first ten; the three since took a minute each.
    assert out.getvalue().splitlines()[-1] == "Working on weights: 13 of 20, about 7 min left"


def test_several_lines_come_at_most_every_few_seconds(clock: list[float]) -> None:
    out = io.StringIO()
    lines = Lines(out)
    for done in range(100):
        lines("check", done, 100)
        clock.append(clock[-1] + 0.125)
    lines("check", 100, 100)
    assert out.getvalue().splitlines() == [
        "Checking …",
        "Checking: 40 of 100, about 8 s left",
        "Checking: 80 of 100, about 2 s left",
        "Checking: done in 12 s",
    ]


def test_every_stage_has_a_title() -> None:
    sources = Path(compress.__file__).parent.rglob("*.py")
    stages = {stage for path in sources for stage in re.findall(r'progress\("(\w+)"', path.read_text())}
    assert {"quantize", "gradients", "forwards"} <= stages
    assert [stage for stage in sorted(stages) if title_of(stage) == stage] == []
