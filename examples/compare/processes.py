"""Workers: processes that answer one request after the other, each in the environment of its engine."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import HERE, environment

from runtime.errors import UserError


@dataclass(frozen=True)
class Start:
    """One worker to start: `module` is one of workers/, `options` what it is given beside the number of threads."""

    name: str
    module: str
    python: Path
    options: Mapping[str, str]
    log: Path


class Worker:
    """A running worker and its two pipes."""

    def __init__(self, start: Start, process: "subprocess.Popen[str]"):
        self.start, self.process = start, process

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises UserError with the worker's last words where it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `reply` says why
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """The next line from the worker."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            last = (self.start.log.read_text(errors="replace").strip().splitlines() or ["(no message)"])[-1]
            raise UserError(f"{self.start.name} ended with exit code {code}: {last}; see {self.start.log}")
        return json.loads(line)


@contextmanager
def started(start: Start, threads: int) -> Iterator[Worker]:
    """The running worker; it has ended when the block does."""
    command = [str(start.python), "-m", f"workers.{start.module}", "--threads", str(threads)]
    for name, value in start.options.items():
        command += [f"--{name}", value]
    with start.log.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            env=environment(threads, start.options.get("kernels", "auto")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Worker(start, process)
        finally:
            process.kill()
            process.communicate()
