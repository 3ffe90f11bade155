"""examples/compare/draft_losses.py: one row a loss, from a run folder to a table."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.distill.acceptance import Acceptance


def test_the_table(compare: Any) -> None:
    module = compare("draft_losses")
    before, after = Acceptance(0.5, 3.0, 0.6, 0.7), Acceptance(0.55, 3.2, 0.58, 0.75)
    nothing = Acceptance(None, None, 0.6, 0.7)
    rows = [module.Row("jsd", before, after, 10, 20_480, 3.0), module.Row("forward_kl", nothing, after, 1, 2, 3.0)]
    lines = module.table(rows).splitlines()
    assert lines[2] == (
        "| jsd | 0.500 -> 0.550 (+0.050) | 0.600 -> 0.580 (-0.020) | 0.700 -> 0.750 (+0.050) | 20,480 |"
    )
    assert "nothing was drafted" in lines[3]


@pytest.mark.slow
def test_two_losses_of_a_tiny_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny("llama", max_position_embeddings=512), tmp_path / "run" / "model")
    shutil.copytree(tiny("llama", seed=5, num_hidden_layers=1, max_position_embeddings=512), tmp_path / "run" / "draft")
    script = Path(__file__).parents[2] / "examples" / "compare" / "draft_losses.py"
    command = [sys.executable, str(script), str(tmp_path / "run"), "--losses", "forward_kl,jsd", "--tokens", "8192"]
    command += ["--work", str(tmp_path / "work"), "--stage", '{"on_policy_fraction": 0, "teacher": 0}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| forward_kl | " in done.stdout and "| jsd | " in done.stdout
    rows = json.loads((tmp_path / "work" / "draft_losses.json").read_text())
    assert all(row["after"]["agreement_t1"] > row["before"]["agreement_t1"] for row in rows)
