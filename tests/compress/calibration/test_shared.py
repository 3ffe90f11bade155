"""Calibration shared by processes: the same bytes as one process writes, for an odd number of windows."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _run(out: Path, processes: int, model: Path, text: Path, recipe: str) -> "subprocess.CompletedProcess[str]":
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    words = ["-m", "compress.run", "--recipe", recipe, "--model", str(model), "--out", str(out), "--calib", str(text)]
    words += ["--samples", "5", "--seq-len", "24", "--eval-tokens", "0", "--no-speed", "--threads", "1"]
    return subprocess.run(
        [sys.executable, *start, *words],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _digests(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "model").rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int4-gptq", "int4-awq", "int8-smoothquant", "wanda-50"])
def test_one_and_three_processes_write_equal_bytes(
    tiny: Callable[..., Path], text: Path, tmp_path: Path, recipe: str
) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    for out, processes in ((one, 1), (three, 3)):
        done = _run(out, processes, tiny("llama"), text, recipe)
        assert done.returncode == 0, done.stderr
    assert _digests(one) == _digests(three) and _digests(one)
    # Other text gives other bytes: the statistics matter.
    text.write_text(text.read_text()[::-1])
    assert _run(tmp_path / "other", 1, tiny("llama"), text, recipe).returncode == 0
    assert _digests(tmp_path / "other") != _digests(one)


@pytest.mark.slow
def test_a_recipe_that_reads_no_text_wants_one_process(tiny: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    done = _run(tmp_path / "out", 2, tiny("llama"), text, "int4-rtn")
    assert done.returncode != 0
    assert "recipe int4-rtn neither trains nor calibrates" in done.stderr and not (tmp_path / "out").exists()
