"""Commands in processes of their own that start at once: forked from one that has imported torch and transformers.

These take four seconds of each process, which is most of what a test of a short command took. What is ours is imported
by every process anew, as a user's is.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_IMPORTED = [
    "torch",
    # Not `transformers` alone, whose classes are imported when they are asked for.
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
    "numpy",
    "safetensors.torch",
    "pydantic",
    "rich.progress",
    "rich.table",
    "typer._adapters",
]
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run(
    module: str,
    *words: object,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """`python -m module words …`, with files for its three streams.

    cwd, env  its directory and its environment: those of this process.

    Raises subprocess.TimeoutExpired where it runs longer than `timeout` seconds; it is killed then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    command = [module, *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name, _ in _STREAMS]
        paths[0].write_text(input, encoding="utf-8")
        place = str(Path.cwd() if cwd is None else cwd)
        given = (command, paths, place, dict(os.environ if env is None else env))
        process = context.Process(target=_become, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        said = [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths[1:]]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def _become(command: list[str], paths: list[Path], cwd: str, environment: dict[str, str]) -> None:
    """In the new process: it becomes the command."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, ((name, mode), path) in enumerate(zip(_STREAMS, paths, strict=True)):
        with path.open(mode) as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (the process's own)
    sys.path.insert(0, cwd)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
