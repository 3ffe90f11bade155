"""examples/short_head.py: drafts by whole and short heads take their turns."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_table() -> None:
    script = Path(__file__).parents[2] / "examples" / "short_head.py"
    options = ["--shape", "pair", "--layers", "2", "--tokens", "256,512", "--rounds", "3"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows if row[0].isdigit()] == ["4096", "256", "512"]
    assert all(float(row[1]) > 0 for row in rows if row[0].isdigit()) and "a step" in done.stdout
