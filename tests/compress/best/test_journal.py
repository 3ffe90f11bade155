"""What was measured is found again, by the same question only."""

from pathlib import Path

import pytest

from compress.best.journal import NAME, open_journal
from compress.errors import UserError


def test_figures_are_found_again(tmp_path: Path) -> None:
    open_journal(tmp_path, {"seed": 0}).note(damages=[[0.0, 0.25]], measured={"k": {"disk": 3}})
    found = open_journal(tmp_path, {"seed": 0})
    assert found.damages == [[0.0, 0.25]] and found.measured == {"k": {"disk": 3}} and not found.timed


def test_another_question_is_refused(tmp_path: Path) -> None:
    open_journal(tmp_path, {"seed": 0})
    with pytest.raises(UserError, match=r"asked otherwise \(seed was 0 and is 1\)"):
        open_journal(tmp_path, {"seed": 1})


def test_a_damaged_journal_is_told(tmp_path: Path) -> None:
    open_journal(tmp_path, {"seed": 0})
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(UserError, match="damaged"):
        open_journal(tmp_path, {"seed": 1})
