"""Compressed checkpoints that are kept: a peer's depends on nothing of ours, so it is made once."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from jobs import Bench, Done, run
from settings import OURS, Setting


def place(folder: Path, setting: Setting, compressor: str) -> Path:
    """Where a checkpoint lies."""
    return folder / setting.name / compressor


def make(
    bench: Bench, folder: Path, jobs: Sequence[tuple[Setting, str]], say: Callable[[str], None]
) -> dict[tuple[str, str], list[Done]]:
    """Makes ours anew, and of the peers' checkpoints those that are not there; says what each took when it was made.

    A checkpoint appears complete or not at all. `folder` belongs to one model, one set of windows and one number of
    threads. Raises UserError where a compressor fails.
    """
    import shutil

    taken = {}
    for setting, compressor in jobs:
        out = place(folder, setting, compressor)
        record = out.with_name(f"{compressor}.json")
        if compressor == OURS or not (out.is_dir() and _of(record, setting)):
            say(f"{setting.name}: {compressor}")
            out.parent.mkdir(parents=True, exist_ok=True)
            beside = out.with_name(f".{compressor}.partial")
            for old in (out, beside):
                shutil.rmtree(old, ignore_errors=True)
            done = run(bench, setting, compressor, beside)
            record.write_text(json.dumps({"setting": asdict(setting), "done": asdict(done)}, indent=2) + "\n")
            beside.rename(out)
        taken[setting.name, compressor] = [Done(**json.loads(record.read_text())["done"])]
    return taken


def _of(record: Path, setting: Setting) -> bool:
    """Whether the record is of this very setting, values and all."""
    return record.is_file() and json.loads(record.read_text())["setting"] == asdict(setting)
