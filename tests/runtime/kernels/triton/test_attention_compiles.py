"""The kernels of attention compile for GPUs, on a machine without one, to what the promises about bits need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that one program may use: those of 8.6 and 8.9, the least.
SHARED = 101_376
# Kernels that promise the CPU's bits: nothing in them may be contracted or approximate.
REFERENCE = {
    "_norm_kernel",
    "_activation_kernel",
    "_embed_kernel",
    "_rotate_kernel",
    "_turn_kernel",
    "_route_kernel",
    "_piece_kernel",
    "_best_kernel",
    "_move_kernel",
    "_gated_norm_kernel",
    "_convolution_kernel",
}
# Those of layers with a state: sums in another order than the CPU's, and nothing else.
STATES = {"_delta_kernel", "_prepare_kernel", "_space_kernel", "_steps_kernel"}


@pytest.mark.parametrize(
    ("capability", "much"),
    [(90, False), *(pytest.param(which, True, marks=pytest.mark.slow) for which in (80, 90, 100))],
)
def test_kernels_compile(capability: int, much: bool, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[4])
    script = [sys.executable, str(Path(__file__).with_name("compile_attention.py")), str(capability)]
    done = subprocess.run([*script, *(["all"] if much else [])], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in made} == REFERENCE | STATES | {
        "split_kernel",
        "combine_kernel",
        "_many_kernel",
    }
    for kernel in made:
        assert kernel["shared"] <= SHARED, kernel
        name = kernel["kernel"]
        if name in REFERENCE | STATES:
            assert kernel["contracted"] == kernel["approximate"] == 0, kernel
        if name in ("split_kernel", "_many_kernel"):
            # One instruction in all of them: another one would add in another order.
            assert kernel["tensor_cores"] == ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"], kernel
            # Wide float32 keys have memory for one block alone: nothing is on its way meanwhile.
            assert kernel["asynchronous"] > 0 or name != "split_kernel" or kernel["stages"] == 1, kernel
