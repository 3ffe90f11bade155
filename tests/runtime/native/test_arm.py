"""The ARM paths on a machine of another kind: cross-compiled, run by qemu, and the same bits as here."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.native.program import ROOT, command, compile_program, native_of

pytestmark = pytest.mark.slow
COMPILER = "aarch64-linux-gnu-g++"
# As docs/kernels.md says that a wheel is made.
CROSS = {
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    "SETUPTOOLS_EXT_SUFFIX": ".so",
    "CC": COMPILER,
    "CXX": COMPILER,
    "LDCXXSHARED": f"{COMPILER} -shared",
}
# What the library says of the paths from 0 on. Bits: compiled in, known to the processor, let by the system.
LOADER = """
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::puts(dlerror()), 1;
    auto state = reinterpret_cast<int64_t (*)(int64_t)>(dlsym(library, "specpress_path"));
    for (int path = 0; path < 7; path++) std::printf("%d", static_cast<int>(state(path)));
}
"""
NEON = ("neon_i8mm", "neon_dotprod")
# What is computed: all of it has the same bits on every path.
SUBJECTS = ["attention0", "attention1", "attention2", "basis2", "basis3", "bf16", "choose", "decoder", "f32", "gated"]
SUBJECTS += ["int4", "int8"]
SUBJECTS += ["nested", "nf4", "noise", "norm", "quantize", "remember", "rotate", "ternary", "ternary-1.25"]
SUBJECTS += ["trellis", "upper"]


@dataclass(frozen=True)
class Emulated:
    """kernels_test for ARM and the emulator."""

    qemu: str
    binary: Path

    def run(self, processor: str, subject: str) -> str:
        done = command([self.qemu, "-cpu", processor, str(self.binary), subject])
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout


@pytest.fixture(scope="module")
def qemu() -> str:
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if shutil.which(COMPILER) is None or found is None:
        pytest.skip(f"needs {COMPILER} and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    return found


@pytest.fixture(scope="module")
def emulated(qemu: str, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    native = native_of(COMPILER, "linux-aarch64")
    assert list(native.paths) == [*NEON, "portable"]
    return Emulated(qemu, compile_program(native, tmp_path_factory.mktemp("arm"), native.paths, [], ["-static"]))


def digests(printed: str) -> dict[str, dict[str, str]]:
    """By path: by what was computed, its digest."""
    found: dict[str, dict[str, str]] = {}
    for line in printed.splitlines():
        if line.startswith("digest "):
            _, what, path, digest = line.split()
            found.setdefault(path, {})[what] = digest
    return found


def test_processors_get_the_path_that_they_have(emulated: Emulated) -> None:
    assert emulated.run("max", "paths").split() == [*NEON, "portable"]
    assert emulated.run("neoverse-n1", "paths").split() == ["neon_dotprod", "portable"]
    assert emulated.run("cortex-a72", "paths").split() == ["portable"]


def test_every_scheme_has_the_bits_that_it_has_on_x86(emulated: Emulated, tmp_path: Path) -> None:
    """The C++ tests hold on each path, against their own reference; and digests of all that they computed are equal."""
    arm = digests(emulated.run("max", "digests"))
    assert set(arm) == {*NEON, "portable"}
    assert list(arm["portable"]) == SUBJECTS and arm["neon_i8mm"] == arm["neon_dotprod"] == arm["portable"]
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no x86 to compare with; the C++ tests held")
    native = native_of(compiler, "linux-x86_64")
    x86 = digests(command([str(compile_program(native, tmp_path, native.paths, [], [])), "digests"]).stdout)
    assert all(found == arm["portable"] for found in x86.values()) and x86


def test_setup_builds_a_library_for_arm_on_another_machine(qemu: str, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "temp"),
    ]
    subprocess.run(line, cwd=ROOT, env={**os.environ, **CROSS}, check=True, capture_output=True)
    library = tmp_path / "runtime" / "native" / "_specpress.so"
    header = library.read_bytes()[:20]
    # The ELF number of AArch64.
    assert header[:4] == b"\x7fELF" and int.from_bytes(header[18:], "little") == 183
    (tmp_path / "loader.cpp").write_text(LOADER)
    made = command([COMPILER, str(tmp_path / "loader.cpp"), "-o", str(tmp_path / "loader"), "-ldl"])
    assert made.returncode == 0, made.stderr
    libc = Path(command([COMPILER, "-print-file-name=libc.so.6"]).stdout.strip()).resolve()
    for processor, states in {"max": "4447774", "neoverse-n1": "4447754", "cortex-a72": "4447554"}.items():
        root = ["-cpu", processor, "-L", str(libc.parents[1])]
        assert command([qemu, *root, str(tmp_path / "loader"), str(library)]).stdout == states
