"""Ours: `python -m makers.specpress_checkpoint JOB.json`.

The product takes text, not windows: it is given the text, the seed and the sizes from which the others' windows were
drawn, and draws the same ones.
"""

import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from makers.compression import Job, Stopwatch, serve


def compress(job: Job, stopwatch: Stopwatch) -> Mapping[str, str]:
    """The stopwatch runs from the first shard read to the artifact written: the walk reads and writes as it goes."""
    import torch

    with tempfile.TemporaryDirectory(prefix=".ours-", dir=job.out.parent) as room:
        folder = Path(room) / "run"
        with stopwatch:
            ours(job.model, job.setting["recipe"], folder, job.text, job.threads)
        (folder / "model").rename(job.out)
    return {"version": f"specpress {version('specpress')}, torch {torch.__version__}"}


def ours(model: Path, recipe: Mapping[str, Any], out: Path, text: Mapping[str, Any], threads: int) -> None:
    """Runs `recipe` (a recipe's mapping) on the checkpoint `model`, without a report, into the run folder `out`."""
    import yaml

    from compress.pipeline import compress

    file = out.with_name(f"{recipe['name']}.yaml")
    file.write_text(yaml.safe_dump(dict(recipe)))
    drawn = {name: text[name] for name in ("samples", "seq_len", "eval_tokens", "seed")}
    compress(model, file, out, report=lambda *_: {}, calib=text["source"], threads=threads, speed=False, **drawn)


if __name__ == "__main__":
    serve(compress)
