"""One compression in a process of its own: in its compressor's environment, timed from its start to its end."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import struct_rusage
from typing import Any

from models import HERE, environment
from settings import OUR_MAKER, OURS, PEERS, Setting, our_recipe

from runtime.errors import UserError


@dataclass(frozen=True)
class Bench:
    """What all compressions of a comparison share.

    model        the checkpoint.
    windows      a JSON file of token windows; `text` is what they were drawn by (the fields of calibration.Text).
    python, peer_python   our interpreter and the peers'.
    logs         a folder for what they print.
    """

    model: Path
    windows: Path
    text: Mapping[str, Any]
    python: Path
    peer_python: Path
    threads: int
    logs: Path


@dataclass(frozen=True)
class Done:
    """What one compression took.

    wall_seconds  the whole process, from its start to its end.
    seconds       the library's own call, without importing, loading and saving; ours reads and writes as it goes.
    cpu_seconds   of all threads of the process, system's included: what a busy or paused machine does not change much.
    peak_bytes    largest resident memory.
    facts         what the compressor says of itself.
    """

    wall_seconds: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    facts: dict[str, str]


def wanted(settings: Sequence[Setting], peers_only: bool) -> list[tuple[Setting, str]]:
    """Each setting with who can do it: ours where we have a recipe for it (and unless peers_only), and the peer."""
    return [
        (setting, name)
        for setting in settings
        for name in (OURS, setting.peer)
        if name != OURS or (not peers_only and our_recipe(setting) is not None)
    ]


def run(bench: Bench, setting: Setting, compressor: str, out: Path) -> Done:
    """Writes the checkpoint `out`. Raises UserError with the process's last words where it fails."""
    module, extra = (OUR_MAKER, {}) if compressor == OURS else PEERS[compressor]
    python = bench.python if compressor == OURS else bench.peer_python
    bench.logs.mkdir(parents=True, exist_ok=True)
    file = bench.logs / f"{setting.name}.{compressor}.json"
    recipe = {"recipe": our_recipe(setting)} if compressor == OURS else {}
    job = {
        "model": str(bench.model),
        "windows": str(bench.windows),
        "text": dict(bench.text),
        "setting": asdict(setting) | recipe,
        "out": str(out),
        "threads": bench.threads,
    }
    file.write_text(json.dumps(job, indent=2))
    answer, log = file.with_suffix(".answer.json"), file.with_suffix(".log")
    answer.unlink(missing_ok=True)
    began = time.perf_counter()
    code, used = _wait([str(python), "-m", module, str(file)], environment(bench.threads) | extra, log)
    wall = time.perf_counter() - began
    if code != 0 or not answer.is_file():
        last = (log.read_text(errors="replace").strip().splitlines() or ["(no message)"])[-1]
        raise UserError(f"{compressor}, {setting.name}: ended with exit code {code}: {last}; see {log}")
    said = json.loads(answer.read_text())
    return Done(wall, said["seconds"], used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, said["facts"])


def _wait(command: Sequence[str], env: dict[str, str], log: Path) -> tuple[int, struct_rusage]:
    """Exit code of one process and what it used. It runs where its log lies, for libraries leave logs of their own."""
    paths = env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), env.get("PYTHONPATH"))))}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=log.parent, env=paths, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used
