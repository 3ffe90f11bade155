"""The kernels' own C++ tests (tests/native), compiled under the sanitizers and run; no Python inside.

Each source is compiled as setup.py compiles it (once per instruction path, with its macros and flags), at -O1.
"""

import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "native"
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]
# What kernels_test links under the thread sanitizer.
THREAD_TESTS = ("kernels_test", "pool_test", "decoder_test", "model", "layer")
# Leaks are left out: finding them needs rights that containers often withhold.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
PRELOADED = ("libasan.so", "libstdc++.so")
SUBJECTS = ["decoder", "attention", "linear", "rows", "pool"]


@dataclass(frozen=True)
class Native:
    """What setup.py says of the native sources, and the compiler."""

    compiler: str
    folder: Path
    kernels: list[str]
    common: list[str]
    flags: list[str]
    paths: dict[str, list[str]]


@pytest.fixture(scope="module")
def native() -> Native:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        said: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    # A path whose instructions the compiler does not know is left out there too.
    known = {
        name: flags
        for name, flags in {**said["PATHS"], "portable": []}.items()
        if command([compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]).returncode == 0
    }
    return Native(compiler, ROOT / said["HERE"], said["KERNELS"], said["COMMON"], said["FLAGS"], known)


@pytest.fixture(scope="module")
def address(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binary of all paths under the address and undefined-behaviour sanitizers."""
    return build(native, tmp_path_factory.mktemp("address"), native.paths, ADDRESS)


@pytest.fixture(scope="module")
def thread(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binary of the portable path under the thread sanitizer: what threads share is the same on every path."""
    return build(native, tmp_path_factory.mktemp("thread"), {"portable": []}, THREAD)


def command(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, capture_output=True, text=True, timeout=600, env={**os.environ, **ENVIRONMENT}, **options
    )


def build(native: Native, folder: Path, paths: dict[str, list[str]], sanitize: list[str]) -> Path:
    """Compiles and links kernels_test in `folder`; skips the test where a sanitized program does not run at all."""
    probe = folder / "probe.cpp"
    probe.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    made = command([native.compiler, "-std=c++17", *sanitize, "-pthread", str(probe), "-o", str(folder / "probe")])
    ran = command([str(folder / "probe")]) if made.returncode == 0 else made
    if ran.returncode != 0:
        pytest.skip(f"no program runs under {sanitize[0]} here: {ran.stderr.strip()[:200]}")

    # -g1: a finding names its lines.
    flags = [*native.flags, "-O1", "-g1", *sanitize, f"-I{native.folder}"]
    macros = [f"-DSPECPRESS_{name.upper()}" for name in paths]
    jobs: list[tuple[Path, str, list[str]]] = [
        (native.folder / f"{source}.cpp", name, [*own, f"-DSPECPRESS_PATH={name}"])
        for name, own in paths.items()
        for source in native.kernels
    ]
    jobs += [(native.folder / f"{source}.cpp", "common", macros) for source in native.common]
    tests = [s for s in TESTS.glob("*.cpp") if sanitize != THREAD or s.stem in THREAD_TESTS]
    jobs += [(source, "test", ["-Wall", "-Wextra", *macros]) for source in tests]
    # The long ones first, so that none is left alone at the end.
    jobs.sort(key=lambda job: -job[0].stat().st_size)

    def compile_one(job: tuple[Path, str, list[str]]) -> Path:
        source, name, own = job
        out = folder / f"{name}_{source.stem}.o"
        done = command([native.compiler, *flags, *own, "-c", str(source), "-o", str(out)])
        assert done.returncode == 0, done.stderr
        assert source.parent != TESTS or not done.stderr, done.stderr
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, jobs))
    binary = folder / "kernels_test"
    linked = command([native.compiler, *sanitize, "-pthread", *map(str, objects), "-o", str(binary)])
    assert linked.returncode == 0, linked.stderr
    return binary


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


@pytest.mark.slow
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
