"""What a compressor's process is told and what it answers: `python -m makers.X JOB.json`.

JOB.json names the model, the token windows to calibrate on, the setting and the folder to write; the answer lies beside
it as JOB.answer.json. Everybody's own time is taken by these same lines: loading and importing are not in it.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One compression.

    model    a checkpoint directory with a tokenizer.
    windows  a JSON file: a list of windows, each a list of token ids; `tokens` reads it.
    text     how those windows were drawn (corpora and windows' arguments), for a compressor that draws its own.
    setting  the fields of settings.Setting, and of ours the recipe.
    out      the directory to write, which is not there yet.
    """

    model: Path
    windows: Path
    text: Mapping[str, Any]
    setting: Mapping[str, Any]
    out: Path
    threads: int

    def tokens(self) -> list[list[int]]:
        """The windows."""
        windows: list[list[int]] = json.loads(self.windows.read_text())
        return windows


class Stopwatch:
    """Seconds of the compression alone: `with stopwatch:` around the library's own call."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def serve(compress: Callable[[Job, Stopwatch], Mapping[str, str]]) -> None:
    """Runs the job that the command line names. `compress` writes `job.out` and returns facts for a reader."""
    import torch

    file = Path(sys.argv[1])
    given = json.loads(file.read_text())
    job = Job(**given | {name: Path(given[name]) for name in ("model", "windows", "out")})
    torch.set_num_threads(job.threads)
    stopwatch = Stopwatch()
    facts = dict(compress(job, stopwatch)) | {"threads": str(torch.get_num_threads())}
    file.with_suffix(".answer.json").write_text(json.dumps({"seconds": stopwatch.seconds, "facts": facts}))
