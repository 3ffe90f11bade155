"""Compressors on the shape of a published model with random weights, in turn: wall time, since text means nothing."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jobs import Bench, Done, run, wanted
from settings import Setting


@contextmanager
def random_checkpoint(shape: str, blocks: int | None, tokenizer: Path, folder: Path) -> Iterator[Path]:
    """A bfloat16 checkpoint of the shape, of all its blocks or the first `blocks`, gone when the block ends.

    The shape has no tokenizer: `tokenizer`'s is put beside it, whose ids must lie in the shape's vocabulary.
    """
    from runtime.bench.random_models import write_shape

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".shape-", dir=folder) as room:
        model = write_shape(shape, "bf16", Path(room) / "model", head="keep")
        if blocks is not None:
            shorten(model, blocks)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, model / name)
        yield model


def shorten(model: Path, blocks: int) -> None:
    """Leaves the first `blocks` of a checkpoint whose index names a shard for each block."""
    from runtime.checkpoints.safetensors import INDEX

    file, about = model / INDEX, model / "config.json"
    index, config = json.loads(file.read_text()), json.loads(about.read_text())
    if not 1 <= blocks <= config["num_hidden_layers"]:
        raise ValueError(f"expected 1 to {config['num_hidden_layers']} blocks, found {blocks}")

    def stays(name: str) -> bool:
        parts = name.split(".")
        return parts[:2] != ["model", "layers"] or int(parts[2]) < blocks

    kept = {name: shard for name, shard in index["weight_map"].items() if stays(name)}
    for shard in set(index["weight_map"].values()) - set(kept.values()):
        (model / shard).unlink()
    size = sum((model / shard).stat().st_size for shard in set(kept.values()))
    file.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": kept}))
    about.write_text(json.dumps(config | {"num_hidden_layers": blocks}))


def measure(
    bench: Bench, settings: Sequence[Setting], rounds: int, peers_only: bool, say: Callable[[str], None]
) -> dict[tuple[str, str], list[Done]]:
    """Each round every compressor does every setting once, each round beginning with another one.

    What was written is removed at once. Raises UserError where a compressor fails.
    """
    jobs = wanted(settings, peers_only)
    taken: dict[tuple[str, str], list[Done]] = {(setting.name, name): [] for setting, name in jobs}
    for number in range(rounds):
        turn = number % len(jobs)
        for setting, name in jobs[turn:] + jobs[:turn]:
            say(f"round {number + 1} of {rounds}: {setting.name}, {name}")
            with tempfile.TemporaryDirectory(prefix=".timed-", dir=bench.model.parent) as room:
                log = replace(bench, logs=bench.logs / f"round-{number + 1}")
                taken[setting.name, name].append(run(log, setting, name, Path(room) / "model"))
    return taken
