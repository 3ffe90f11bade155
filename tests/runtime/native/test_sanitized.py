"""The kernels' own C++ tests (tests/native), compiled under the sanitizers and run; no Python inside.

Each source is compiled as setup.py compiles it (once per instruction path, with its macros and flags), at -O1: for all
paths that this processor can run. That takes minutes, so these tests are slow ones: run them after a change of the
native sources (`pytest -m slow tests/runtime/native`).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.native import usable
from tests.runtime.native.program import ENVIRONMENT, ROOT, Native, command, compile_program, native_of

pytestmark = pytest.mark.slow

ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]
# What kernels_test links under the thread sanitizer.
THREAD_TESTS = ("kernels_test", "pool_test", "decoder_test", "model", "layer")
PRELOADED = ("libasan.so", "libstdc++.so")
SUBJECTS = ["decoder", "attention", "basis", "linear", "rows", "pool"]
# A path as setup.py names it: as the library names it, where that differs.
NAMES = {"amx_int8": "amx-int8", "avx512": "avx512-vnni", "avxvnni": "avx-vnni", "neon_i8mm": "neon-i8mm"}
NAMES |= {"neon_dotprod": "neon-dotprod"}


@pytest.fixture(scope="module")
def native() -> Native:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    return native_of(compiler, sysconfig.get_platform())


@pytest.fixture(scope="module")
def address(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binary of this processor's paths under the address and undefined-behaviour sanitizers."""
    paths = {name: flags for name, flags in native.paths.items() if usable(NAMES.get(name, name))[0]}
    return build(native, tmp_path_factory.mktemp("address"), paths, ADDRESS)


@pytest.fixture(scope="module")
def thread(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binary of the portable path under the thread sanitizer: what threads share is the same on every path."""
    return build(native, tmp_path_factory.mktemp("thread"), {"portable": []}, THREAD)


def build(native: Native, folder: Path, paths: dict[str, list[str]], sanitize: list[str]) -> Path:
    """Compiles and links kernels_test in `folder`; skips the test where a sanitized program does not run at all."""
    probe = folder / "probe.cpp"
    probe.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    made = command([native.compiler, "-std=c++17", *sanitize, "-pthread", str(probe), "-o", str(folder / "probe")])
    ran = command([str(folder / "probe")]) if made.returncode == 0 else made
    if ran.returncode != 0:
        pytest.skip(f"no program runs under {sanitize[0]} here: {ran.stderr.strip()[:200]}")

    # -g1: a finding names its lines.
    tests = THREAD_TESTS if sanitize == THREAD else ()
    return compile_program(native, folder, paths, ["-O1", "-g1", *sanitize], sanitize, tests)


def run_together(binary: Path, subjects: list[str]) -> None:
    """Runs each subject as a process of its own, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for subject, done in zip(subjects, pool.map(lambda s: command([str(binary), s]), subjects), strict=True):
            assert done.returncode == 0, f"{subject}: {done.stdout}{done.stderr}"
            assert not done.stderr, done.stderr


def test_kernels_run_clean_under_the_address_and_undefined_behaviour_sanitizers(address: Path) -> None:
    run_together(address, SUBJECTS)


def test_a_read_beyond_the_codes_and_an_overflow_are_caught(address: Path) -> None:
    # Every path's vector loads are watched; the same product with whole codes is part of `linear`.
    paths = command([str(address), "paths"]).stdout.split()
    assert paths[-1] == "portable"
    for path in paths:
        found = command([str(address), "overrun", path])
        assert found.returncode != 0
        assert "ERROR: AddressSanitizer" in found.stderr
    found = command([str(address), "overflow"])
    assert found.returncode != 0
    assert "signed integer overflow" in found.stderr


def test_configurations_by_the_thousand_run_clean_in_the_library_under_the_sanitizers(
    native: Native, tmp_path: Path
) -> None:
    """The library as Python loads it, in a copy of the tree; a library's sanitizers have to be loaded first."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.so"))
    flags = " ".join([*ADDRESS, "-g1"])
    variables = {**os.environ, **ENVIRONMENT, **dict.fromkeys(("CFLAGS", "CXXFLAGS", "LDFLAGS"), flags)}
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=copy, env=variables, check=True)
    (library,) = (copy / "runtime" / "native").glob("*.so")
    assert b"__asan_report_load" in library.read_bytes() and b"__ubsan_handle" in library.read_bytes()
    first = [command([native.compiler, f"-print-file-name={name}"]).stdout.strip() for name in PRELOADED]
    # Too much memory is refused as it is without them.
    asked = f"{ENVIRONMENT['ASAN_OPTIONS']}:allocator_may_return_null=1"
    variables |= {"LD_PRELOAD": " ".join(first), "PYTHONPATH": str(copy), "ASAN_OPTIONS": asked}
    tests = copy / "tests" / "runtime" / "checkpoints" / "test_config_mutations.py"
    line = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "slow", str(tests)]
    found = subprocess.run(line, cwd=copy, env=variables, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "1 passed" in found.stdout


def test_threads_share_nothing_unguarded(thread: Path) -> None:
    run_together(thread, ["decoder", "pool"])
    found = command([str(thread), "race"])
    assert found.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in found.stderr


def test_unknown_subjects_and_failed_checks_do_not_pass(address: Path) -> None:
    assert command([str(address), "rows"]).returncode == 0
    found = command([str(address), "nothing"])
    assert found.returncode == 1
    assert "no subject is called nothing" in found.stderr
