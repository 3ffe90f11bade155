"""A llama-bench that somebody built: whether it is one, and what it is started with."""

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UserError

_PATIENCE_S = 30


@dataclass(frozen=True)
class Binary:
    """A llama-bench; `depth`: it can fill the cache before a forward (-d), which older builds and forks cannot."""

    path: Path
    arguments: str
    depth: bool

    def options(self) -> dict[str, str]:
        """Of its worker."""
        return {"binary": str(self.path), "arguments": self.arguments, "depth": str(int(self.depth))}


def bench_binary(path: Path, arguments: str) -> Binary:
    """Asks the binary for its help. Raises UserError for a path that is no llama-bench."""
    try:
        shlex.split(arguments)
    except ValueError as error:
        raise UserError(
            f"--llama-bench-arguments: {arguments!r} cannot be split ({error}); close its quotes"
        ) from error
    # absolute: the worker runs in another folder
    path = path.absolute()
    try:
        said = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=_PATIENCE_S, errors="replace")
        text = said.stdout + said.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "it did not answer" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise UserError(f"--llama-bench: {path} cannot be run ({why}); name a llama-bench binary") from error
    if "--n-prompt" not in text or "--n-gen" not in text:
        raise UserError(f"--llama-bench: {path} does not answer --help as llama-bench does; name a llama-bench binary")
    return Binary(path, arguments, "--n-depth" in text)
