"""kernels_test, the kernels' own C++ tests (tests/native) as a program, compiled as setup.py compiles the kernels."""

import os
import runpy
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "native"
# Leaks are left out: finding them needs rights that containers often withhold.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


@dataclass(frozen=True)
class Native:
    """What setup.py says of the native sources, and a compiler."""

    compiler: str
    folder: Path
    kernels: list[str]
    common: list[str]
    flags: list[str]
    paths: dict[str, list[str]]


def command(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, capture_output=True, text=True, timeout=1800, env={**os.environ, **ENVIRONMENT}, **options
    )


def native_of(compiler: str, platform: str) -> Native:
    """The sources with the paths of a platform as sysconfig names it; without those that the compiler does not know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        said: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    known = {
        name: flags
        for name, flags in said["paths"](platform).items()
        if command([compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]).returncode == 0
    }
    return Native(compiler, ROOT / said["HERE"], said["KERNELS"], said["COMMON"], said["FLAGS"], known)


def compile_program(
    native: Native,
    folder: Path,
    paths: dict[str, list[str]],
    options: list[str],
    link: list[str],
    tests: Collection[str] = (),
) -> Path:
    """Compiles kernels_test with the kernels of `paths` and with `tests`, by default all, and links it in `folder`."""
    flags = [*native.flags, *options, f"-I{native.folder}"]
    macros = [f"-DSPECPRESS_{name.upper()}" for name in paths]
    jobs: list[tuple[Path, str, list[str]]] = [
        (native.folder / f"{source}.cpp", name, [*own, f"-DSPECPRESS_PATH={name}"])
        for name, own in paths.items()
        for source in native.kernels
    ]
    jobs += [(native.folder / f"{source}.cpp", "common", macros) for source in native.common]
    own_tests = [source for source in TESTS.glob("*.cpp") if not tests or source.stem in tests]
    jobs += [(source, "test", ["-Wall", "-Wextra", *macros]) for source in own_tests]
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
    linked = command([native.compiler, *link, "-pthread", *map(str, objects), "-o", str(binary)])
    assert linked.returncode == 0, linked.stderr
    return binary
