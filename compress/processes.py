"""Runs as processes of their own: what they print is kept, and how they ended is told."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a run's process ended: its exit code (negative: the signal that ended it) and its last line of error."""

    code: int
    error: str


Say = Callable[[str], None]
# (command, file for everything that it prints, where its lines of progress go) → how it ended.
Launch = Callable[[Sequence[str], Path, Say], Ended]


def launch(command: Sequence[str], log: Path, say: Say) -> Ended:
    """Runs a command to its end; all that it prints goes to `log`, its progress to `say` as well."""
    last = ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:
                file.write(line)
                file.flush()
                say(line.rstrip())
                last = line.strip() or last
            return Ended(process.wait(), last)
        except BaseException:
            # Ctrl-C reaches the run too, which then puts its folder in order.
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
