"""guidellm's own command against the server."""

import json
import subprocess
import sys
from pathlib import Path


def test_guidellm(address: str, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", address, "--model", "pair",
        "--profile", "synchronous", "--max-requests", "3", "--data", "prompt_tokens=32,output_tokens=8",
        "--processor", str(Path(__file__).parents[2] / "examples/pair/target"),
        "--output-dir", str(tmp_path), "--outputs", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert report["benchmarks"][0]["metrics"]["request_totals"]["successful"] == 3
    assert report["benchmarks"][0]["metrics"]["request_totals"]["errored"] == 0
