"""The kernels compile for GPUs, on a machine without one, to what the promises about bits need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that one program may use; 8.0's siblings (8.6, 8.9) have the least.
SHARED = {80: 101_376, 90: 232_448}


@pytest.mark.parametrize(
    ("capability", "much"),
    [(90, False), pytest.param(80, True, marks=pytest.mark.slow), pytest.param(90, True, marks=pytest.mark.slow)],
)
def test_kernels_compile(capability: int, much: bool, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[4])
    script = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)]
    done = subprocess.run([*script, *(["all"] if much else [])], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    few = {"few_rows_product", "few_groups_product", "float_product"}
    assert {kernel["kernel"] for kernel in made} >= few | {"rows_product", "groups_product", "round_rows"}
    assert {kernel["kernel"] for kernel in made if kernel["picked"]} >= few | {
        *("round_groups", "add_experts_kernel", "_route_kernel")
    }
    for kernel in made:
        assert kernel["shared"] <= SHARED[capability], kernel
        name = kernel["kernel"]
        if name == "float_product":
            continue
        # Integer products and roundings have the CPU's bits only without these.
        assert kernel["contracted"] == kernel["approximate"] == 0, kernel
        if name.endswith("_product"):
            assert kernel["tensor_cores"], kernel
            # Whatever a loop reads is under way before it is wanted.
            assert kernel["asynchronous"] > 0, kernel
            assert kernel["waits"] == 0, kernel
