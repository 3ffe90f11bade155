"""schemathesis on /openapi.json: every phase, every check. Slow: `pytest -m slow`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_schemathesis(address: str, tmp_path: Path) -> None:
    # A schema cannot say what fits the vocabulary, the context, or another field: sound data may be refused with 400.
    (tmp_path / "schemathesis.toml").write_text(
        '[checks]\npositive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "429", "503"]\n'
    )
    command = [
        str(Path(sys.executable).with_name("st")), "run", f"{address}/openapi.json", "--checks", "all",
        "--phases", "examples,coverage,fuzzing,stateful", "-n", "300", "--seed", "1", "--request-timeout", "120",
        "--exclude-path-regex", "^/admin",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
