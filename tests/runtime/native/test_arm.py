"""The ARM paths on a machine of another kind: cross-compiled, run by qemu, and the same bits as here."""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.native.program import command, compile_program, native_of

pytestmark = pytest.mark.slow
COMPILER = "aarch64-linux-gnu-g++"
NEON = ("neon_i8mm", "neon_dotprod")
# What is rounded as IEEE 754 says, operation by operation, and has the same bits on every path …
EXACT = ["choose", "gated", "int4", "int8", "nested", "nf4", "noise", "norm", "quantize", "remember", "rotate"]
EXACT += ["ternary", "upper"]
# … and float sums, whose multiply-adds the portable path does not fuse.
FUSED = ["attention0", "attention1", "attention2", "bf16", "decoder", "f32"]


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
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if shutil.which(COMPILER) is None or qemu is None:
        pytest.skip(f"needs {COMPILER} and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
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
    assert all(sorted(found) == sorted(EXACT + FUSED) for found in arm.values())
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no x86 to compare with; the C++ tests held")
    native = native_of(compiler, "linux-x86_64")
    paths = {name: native.paths[name] for name in ("avx2", "portable")}
    x86 = digests(command([str(compile_program(native, tmp_path, paths, [], [])), "digests"]).stdout)
    assert arm["portable"] == x86["portable"]
    for path in NEON:
        assert {what: arm[path][what] for what in EXACT} == {what: x86["portable"][what] for what in EXACT}
        if "avx2" in x86:
            assert arm[path] == x86["avx2"]
