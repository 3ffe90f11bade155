"""Training's checkpoints: safetensors files and one JSON file that says which of them count.

A checkpoint is written beside the last one, then training.json is replaced as a whole, then the old files go: at every
instant one whole checkpoint is there. Every file carries its SHA-256, training.json its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact import TRAINING, files, safetensors
from compress.artifact.journal import differences
from compress.errors import UserError

_SCHEMA = 2
_PATTERNS = ("checkpoint-*.safetensors", "best-*.safetensors", "*.tmp")


@dataclass(frozen=True)
class Point:
    """One point of the loss curve, after `step` steps.

    loss      the training loss in nats, mean over the steps since the point before; None before the first step.
    rate      the learning rate of the last step.
    held_out  the held-out loss in nats, where it was measured then.
    """

    step: int
    tokens: int
    loss: float | None
    rate: float
    held_out: float | None = None


@dataclass
class TrainingState:
    """How far training has come.

    steps    all of them; fixed before the first one.
    step     steps done.
    before   held-out loss before the first step.
    best     the lowest held-out loss so far, after `best_step` steps.
    seconds  of work, over all processes that did some of it.
    since    losses of the steps since the curve's last point.
    """

    steps: int
    step: int
    before: float
    best: float
    best_step: int
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)
    since: list[float] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run in a folder of their own.

    identity  plain JSON data that the weights depend on; another one's checkpoint is refused.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self.identity = folder, identity
        self._best: dict[str, Any] | None = None

    def exists(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.folder / TRAINING).is_file()

    def keep_best(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Writes the best weights so far. They count from the next `save` on; until then the older ones do."""
        self._best = self._write(f"best-{step:08d}.safetensors", weights)

    def save(self, standing: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Replaces the checkpoint."""
        tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        last = self._write(f"checkpoint-{standing.step:08d}.safetensors", tensors)
        body = {"identity": self.identity, "standing": asdict(standing), "checkpoint": last, "best": self._best}
        files.write_sealed(_SCHEMA, body, self.folder / TRAINING)
        self._sweep({record["file"] for record in (last, self._best) if record})

    def load(self) -> tuple[TrainingState, dict[str, Tensor], dict[str, Tensor]]:
        """Where training stands, its weights and its optimisers' moments.

        Raises UserError for a checkpoint that is damaged, missing, or of a run with another identity, naming what.
        """
        body = files.read_sealed(self.folder / TRAINING, _SCHEMA, ": start again with --force")
        changed = differences(body["identity"], self.identity)
        if changed:
            raise UserError(
                f"{self.folder / TRAINING}: going on with training needs what it was started with, but {changed}: "
                "undo the change, or start again with --force"
            )
        last, self._best = body["checkpoint"], body["best"]
        tensors = self._read(last)
        if self._best:
            self._check(self._best)
        stood = body["standing"]
        standing = TrainingState(**stood | {"curve": [Point(**point) for point in stood["curve"]]})
        return standing, _stripped(tensors, "weights."), _stripped(tensors, "optimizer.")

    def best(self) -> dict[str, Tensor]:
        """The weights with the lowest held-out loss."""
        if self._best is None:
            raise ValueError("expected best weights, found none kept")
        return self._read(self._best)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        written = safetensors.write_part(self.folder / name, tensors)
        return {"file": name, "bytes": written.bytes, "sha256": written.sha256}

    def _check(self, record: Mapping[str, Any]) -> Path:
        path = self.folder / str(record["file"])
        if not path.is_file() or path.stat().st_size != record["bytes"] or files.sha256(path) != record["sha256"]:
            raise UserError(
                f"{path} is damaged or missing: expected {record['bytes']} bytes with the checksum in {TRAINING}: "
                "start again with --force"
            )
        return path

    def _read(self, record: Mapping[str, Any]) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self._check(record))

    def _sweep(self, kept: set[str]) -> None:
        for path in sorted(path for pattern in _PATTERNS for path in self.folder.glob(pattern)):
            if path.name not in kept:
                files.remove(path)


def moments(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' state as tensors: "optimiser.parameter.key"."""
    return {
        f"{number}.{index}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, optimizer in enumerate(optimizers)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def load_moments(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Gives the optimisers what `moments` gave."""
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _stripped(tensors, f"{number}.").items():
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _stripped(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
