"""guidellm's own command against the server."""

import json
import subprocess
import sys
from pathlib import Path


def test_guidellm(address: str, tmp_path: Path) -> None:
    target = Path(__file__).parents[2] / "examples/pair/target"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", f"kind=openai_http,target={address},model=pair",
        "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=3",
        "--tokenizer", f"kind=hf_auto,model={target}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
        "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0), totals
