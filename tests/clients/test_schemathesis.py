"""schemathesis on /openapi.json: every phase, every check, every endpoint."""

import subprocess
import sys
from pathlib import Path


def test_schemathesis(address: str, tmp_path: Path) -> None:
    # A schema cannot say what fits the vocabulary, the context, or another field: sound data may be refused with 400.
    (tmp_path / "schemathesis.toml").write_text(
        '[checks]\npositive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "429", "503"]\n'
    )
    command = [
        str(Path(sys.executable).with_name("st")), "run", f"{address}/openapi.json", "--checks", "all",
        "--phases", "examples,coverage,fuzzing,stateful", "-n", "100", "--seed", "1", "--request-timeout", "120",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:]
