"""examples/compare/onnx_quantizers.py: our 4 bits beside ONNX Runtime's, from the pair's target to a table."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_the_table_is_best_first(compare: Any) -> None:
    module = compare("onnx_quantizers")
    worse = module.Row("RTN", 14.25, (1.01, 1.03), 0.02, 0.9, 12.0, 3.2)
    better = module.Row("**ours, int4-gptq**", 14.0, (1.0, 1.02), 0.01, 0.925, 11.5, 60.0)
    lines = module.table([worse, better], 13.9).splitlines()
    assert lines[0] == "Original: perplexity 13.9000."
    assert lines[4] == "| **ours, int4-gptq** | 14.0000 | 1.0000 to 1.0200 | 0.01000 | 92.50% | 11.5 | 60 s |"
    assert lines[5].startswith("| RTN | 14.2500 |")


@pytest.mark.slow
def test_ours_beats_every_quantizer_of_onnx_runtime(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    script = Path(__file__).parents[2] / "examples/compare/onnx_quantizers.py"
    words = ["--recipes", "int4-gptq", "--tokens", "16384", "--work", str(tmp_path / "work")]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8 and rows[0].startswith("| **ours, int4-gptq** |")
