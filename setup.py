"""The native kernels: every kernel source once per instruction path; which one runs is decided at run time.

They are optional. Without a C++ compiler the install succeeds, says so in a line, and reference.py runs in their place.
"""

import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, ExecError, OptionError, PlatformError

HERE = "runtime/native"
# Compiled for each path …
KERNELS = [
    "int8",
    "int4",
    "nf4",
    "ternary",
    "three_of_four",
    "nested",
    "trellis",
    "trellis_encode",
    "bf16",
    "f32",
    "rows",
    "routing",
    "basis",
    "cache",
    "attention",
    "delta_rule",
    "state_space",
    "halves",
    "block_math",
    "memory",
    "path",
]
# … and once.
COMMON = [
    "api",
    "processor",
    "sound",
    "decoder",
    "products",
    "attention_layer",
    "convolution_layer",
    "delta_layer",
    "mamba_layer",
    "mlp_layer",
    "draft",
    "block_draft",
    "block_tree",
    "noise",
    "moves",
    "pool",
    "pack",
]
# No contraction: an operation rounds where reference.py rounds. Warnings: gcc 12 takes its own intrinsics for mistakes.
# Symbols for debuggers, which Python's own flags ask for, cost a third of the compiler's time and most of the library.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"]
# Byte shuffles of whole registers: processors with AMX have them all, those with AVX-512 VNNI but for the first.
_VBMI = "-mavx512vbmi"
_DOTPROD = "-march=armv8.2-a+dotprod"
# Each path of an architecture, and what it is compiled with.
X86 = {
    "amx_int8": [*_AVX512, _VBMI, "-mamx-tile", "-mamx-int8"],
    "avx512": _AVX512,
    "avxvnni": [*_AVX2, "-mavxvnni"],
    "avx2": _AVX2,
    "portable": [],
}
# Kernels that a path has a second time, with more instructions, in a namespace of their own; they choose when they run.
TWINS = {"avx512": ("avx512_vbmi", ["trellis"], [_VBMI])}
ARM = {"neon_i8mm": [f"{_DOTPROD}+i8mm"], "neon_dotprod": [_DOTPROD], "portable": []}


def paths(platform: str) -> dict[str, list[str]]:
    """The paths of a platform as sysconfig names it: where wheels are built for another machine, that one's."""
    if not platform.startswith("macosx"):
        known = {"x86_64": X86, "amd64": X86, "aarch64": ARM}
        return known.get(platform.split("-")[-1], {"portable": []})
    # A universal Python compiles for both architectures in one command. Apple's compiler takes dotprod for granted.
    found: dict[str, list[str]] = {}
    for arch, own in {"x86_64": X86, "arm64": {**ARM, "portable": ["-march=armv8-a"]}}.items():
        if platform.endswith((arch, "universal2")):
            for path, flags in own.items():
                found.setdefault(path, []).extend(part for flag in flags for part in (f"-Xarch_{arch}", flag))
    return found


PATHS = paths(sysconfig.get_platform())


class BuildKernels(build_ext):
    """Compiles the paths that the compiler knows; failing that leaves the library out.

    `--paths avx2` compiles those named and the portable one only, `--paths portable` that alone: what then runs is what
    runs on processors without the rest.
    """

    user_options: ClassVar = [*build_ext.user_options, ("paths=", None, f"of {', '.join(PATHS)}; default: all")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.paths = ",".join(PATHS)

    def finalize_options(self) -> None:
        super().finalize_options()
        self.chosen = {"portable", *(name.strip() for name in self.paths.split(","))}
        unknown = self.chosen - {"portable", *PATHS}
        if unknown:
            raise OptionError(f"--paths: {', '.join(sorted(unknown))} is none of portable, {', '.join(PATHS)}")

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except (BaseError, CCompilerError, ExecError, PlatformError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"specpress: native kernels left out, plain torch will run instead ({reason})", file=sys.stderr)

    def _build(self, ext: Extension) -> None:
        objects: list[str] = []
        macros: list[tuple[str, str | None]] = []
        with ThreadPoolExecutor() as pool:
            # All paths at once: at the end of each, one long file would keep the other cores waiting.
            started = {name: self._path(pool, name, flags) for name, flags in PATHS.items() if name in self.chosen}
            for name, files in started.items():
                try:
                    objects += [made for file in files for made in file.result()]
                except CCompilerError:
                    if name == "portable":
                        raise
                    print(f"specpress: the compiler does not know the instructions of {name}", file=sys.stderr)
                else:
                    macros.append((f"SPECPRESS_{name.upper()}", None))
            files = self._compile(pool, COMMON, "common", macros, [])
            objects += [made for file in files for made in file.result()]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"], target_lang="c++")

    def _path(self, pool: ThreadPoolExecutor, name: str, flags: list[str]) -> "list[Future[list[str]]]":
        """Starts to compile a path's kernels, and its twin's."""
        own: list[tuple[str, str | None]] = [("SPECPRESS_PATH", name)]
        files = []
        if name in TWINS and not sysconfig.get_platform().startswith("macosx"):
            twin, kernels, more = TWINS[name]
            files += self._compile(pool, kernels, twin, [("SPECPRESS_PATH", twin)], [*flags, *more])
            own.append(("SPECPRESS_TWIN", twin))
        return files + self._compile(pool, KERNELS, name, own, flags)

    def _compile(
        self,
        pool: ThreadPoolExecutor,
        names: list[str],
        folder: str,
        macros: list[tuple[str, str | None]],
        flags: list[str],
    ) -> "list[Future[list[str]]]":
        def one(name: str) -> list[str]:
            made: list[str] = self.compiler.compile(
                [f"{HERE}/{name}.cpp"],
                output_dir=str(Path(self.build_temp) / folder),
                macros=macros,
                extra_postargs=[*FLAGS, *flags],
            )
            return made

        return [pool.submit(one, name) for name in names]


# The embedded pair lives once, in examples/, and travels in the wheel as data.
PAIR = {f"compress._pair.{part}": f"examples/pair/{part}" for part in ("target", "draft")}

setup(
    packages=[*find_packages(include=["calib*", "runtime*", "compress*", "specpress*"]), *PAIR],
    package_dir=PAIR,
    ext_modules=[
        Extension(
            "runtime.native._specpress",
            sources=[f"{HERE}/{name}.cpp" for name in [*KERNELS, *COMMON]],
            depends=[
                f"{HERE}/{name}.h"
                for name in (
                    "vec",
                    "neon",
                    "fused",
                    "kernels",
                    "paths",
                    "linear",
                    "float_linear",
                    "amx",
                    "words",
                    "cache",
                    "pool",
                    "pack",
                    "three_of_four",
                    "trellis",
                    "decoder",
                    "products",
                    "states",
                    "noise",
                )
            ],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
