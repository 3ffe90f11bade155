"""Damaged ONNX exports: one sentence or a decoder, never a crash of the process or a bill of gigabytes.

Some 200 mutations here, 10,000 with `-m slow`; each batch in a process of its own (fuzz_driver.py), as ONNX Runtime is
not ours. Needs onnx, onnxscript and onnxruntime (the extra `onnx`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compress.onnx_models import export
from tests.compress.packed_models import write_packed

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

Tiny = Callable[..., Path]
ROOT = Path(__file__).parents[4]
# Bytes in model.onnx: the graph alone, or all of it.
KINDS = {"float": 10_000, "int4-asymmetric": 10_000, "nf4": 10_000, "int8": 1 << 29}
# Python, torch and ONNX Runtime take 300 MB; the model has 0.3.
_MOST_BYTES = 600 << 20


@pytest.fixture(scope="module")
def folders(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, out = tiny("llama", num_hidden_layers=1), tmp_path_factory.mktemp("fuzz")
    for kind, one_file in KINDS.items():
        model = source if kind == "float" else write_packed(source, out / "models" / kind, kind)
        export("llama-1", model, out / kind, one_file=one_file)
    return {kind: out / kind for kind in KINDS}


def fuzz(folders: list[Path], count: int, seed: int) -> list[int]:
    """How many of so many mutations of each were refused; an assertion names the one that ended the process."""
    driver = Path(__file__).with_name("fuzz_driver.py")
    command = [sys.executable, str(driver), str(count), str(seed), *map(str, folders)]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=False)
    last = (done.stdout.splitlines() or ["none"])[-1]
    assert done.returncode == 0, f"mutation {last} of seed {seed}, {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(last)
    assert found["peak"] < _MOST_BYTES
    assert all(folder["longest"] < 30 for folder in found["folders"].values())
    return [folder["refused"] for folder in found["folders"].values()]


def test_some_mutations(folders: dict[str, Path]) -> None:
    assert all(20 < refused < 50 for refused in fuzz(list(folders.values()), 50, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_mutations(kind: str, folders: dict[str, Path]) -> None:
    """10,000 of the format: a quarter for each kind of weights."""
    [refused] = fuzz([folders[kind]], 2500, seed=1)
    assert 1000 < refused < 2500
