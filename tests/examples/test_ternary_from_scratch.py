"""The example trains both models, plots them, and its ternary one runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.checkpoints.open import open_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_models_are_trained_and_the_ternary_one_is_packed(tmp_path: Path) -> None:
    source = tmp_path / "code.txt"
    source.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(2000)))
    arguments = ("--tokens", "2048", "--batch", "4", "--length", "64", "--source", str(source), "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ternary_from_scratch.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| full precision  | 2,048 |" in done.stdout and "| BitNet b1.58    | 2,048 |" in done.stdout
    curves = json.loads((tmp_path / "curves.json").read_text())
    # Both start from the same random weights; rounding changes what they say from the start.
    assert all(curve["best"] < curve["before"] for curve in curves.values())
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.quantization is not None and checkpoint.quantization["quant_method"] == "bitnet"
    assert checkpoint.config["vocab_size"] == 4096
