"""A teacher's answers on disk: its k most probable tokens at every position, and what probability is left for others.

One file of fixed records, memory-mapped, beside a JSON file that says what it holds and has its checksum. k + 1 classes
with all of the probability make every divergence proper (`distributions.collapse`): without the last one, a student
would be pushed to give all of its mass to the k tokens.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.artifact import files
from compress.distill.divergences import Divergence, collapse, divergence
from compress.distill.teacher import Teacher, of_model
from compress.errors import UserError
from compress.progress import Progress
from compress.recipe.training import Settings
from compress.recipe.training_stages import Answers
from compress.training.contract import Batches, StageContext
from compress.training.data import PackedBatches, ShuffledNumbers
from compress.training.parallel import World, current


@dataclass(frozen=True)
class TopLogits:
    """What the cache has of some windows.

    tokens     (n, T, k) int64, the most probable first.
    log_probs  (n, T, k + 1) float32: theirs, and last that of all other tokens together. Their exponentials sum to 1.
    """

    tokens: Tensor
    log_probs: Tensor

    def to(self, device: torch.device) -> "TopLogits":
        """The same on another device."""
        return TopLogits(self.tokens.to(device), self.log_probs.to(device))

    def divergence(self, student: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
        """The mean divergence over k + 1 classes of student logits (n, T, V) at the cache's temperature, in nats."""
        rows = collapse(student.flatten(0, -2), self.tokens.flatten(0, -2))
        return divergence(rows, self.log_probs.flatten(0, -2), kind, beta)


class LogitsCache:
    """Read-only; `write` makes one. Raises UserError where there is none that is whole and of this key."""

    def __init__(self, path: Path, key: Mapping[str, Any]):
        about = files.kept(path, key)
        if about is None:
            raise UserError(f"{path}: expected a teacher's answers to {dict(key)}, found none: remove it")
        self.k, self.windows, self.length = (int(about[name]) for name in ("k", "windows", "length"))
        self._records = np.memmap(path, dtype=_record(self.k), mode="r", shape=(self.windows, self.length))

    def __len__(self) -> int:
        return self.windows

    def take(self, windows: Tensor) -> TopLogits:
        """Answers to the windows of these numbers (n,) int64."""
        found = self._records[windows.numpy()]
        tokens = torch.from_numpy(found["token"].astype(np.int64))
        return TopLogits(tokens, torch.from_numpy(np.ascontiguousarray(found["log_prob"])))


def write(
    path: Path, teacher: Teacher, windows: Tensor, k: int, key: Mapping[str, Any], progress: Progress, rows: int = 8
) -> None:
    """Writes the k best answers to each token of `windows` (N, T) int64; the file is whole or not there.

    key   plain JSON data that says which teacher and which windows these are.
    rows  windows in one call of the teacher.
    Raises ValueError for k out of range and UserError for logits that are not finite.
    """
    count, length = windows.shape
    with files.keeping(path, {**key, "k": k, "windows": count, "length": length}) as file:
        for first in range(0, count, rows):
            progress("teacher", first, count)
            logits = teacher(windows[first : first + rows])
            if not 0 < k < logits.shape[-1]:
                raise ValueError(f"k must be from 1 to {logits.shape[-1] - 1}, found {k}")
            file.write(_records(logits.flatten(0, 1), k, first).tobytes())
    progress("teacher", count, count)


def _records(logits: Tensor, k: int, window: int) -> NDArray[np.void]:
    if bool(torch.isnan(logits).any()) or bool((logits == torch.inf).any()):
        raise UserError(f"teacher: expected finite logits, found none in windows from {window + 1} on")
    kept = logits.topk(k, dim=-1).indices
    found = np.empty(len(logits), dtype=_record(k))
    found["token"] = kept.cpu().numpy()
    found["log_prob"] = collapse(logits, kept).float().cpu().numpy()
    return found


def _record(k: int) -> np.dtype[np.void]:
    return np.dtype([("token", "<i4", (k,)), ("log_prob", "<f4", (k + 1,))])


class NumberedBatches:
    """Windows (N, length + 1) int64 in the order of `ShuffledNumbers`; before a window stands its number."""

    def __init__(self, windows: Tensor, settings: Settings, world: World | None = None):
        self._windows, self._numbers = windows, ShuffledNumbers(len(windows), settings, world)

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of micro-batch `micro` of a step: (B / processes, 1 + length + 1) int64."""
        numbers = self._numbers.take(step, micro)
        return torch.cat([numbers, self._windows[numbers.squeeze(1)]], dim=1)


def keep(
    answers: Answers, teacher: Any, batches: PackedBatches, settings: Settings, folder: Path, progress: Progress
) -> tuple[LogitsCache, NumberedBatches]:
    """What the teacher, a transformers model, says of the first of `batches`, asked once, and the batches for that.

    A file in `folder` of the same windows is used again; of several processes the first one writes it. Raises UserError
    for more windows than the text has, and where the teacher's vocabulary is no larger than `answers.top`.
    """
    if answers.windows > batches.windows:
        raise UserError(
            f"answers.windows: expected at most the {batches.windows} windows of the training text, found "
            f"{answers.windows}: ask for fewer or name a longer text with training.source"
        )
    vocabulary = int(teacher.config.vocab_size)
    if answers.top >= vocabulary:
        raise UserError(f"answers.top: expected fewer than the teacher's {vocabulary} tokens, found {answers.top}")
    windows = torch.from_numpy(np.stack([batches.window(index) for index in range(answers.windows)]))
    key = {"text": hashlib.sha256(windows.numpy().tobytes()).hexdigest(), "top": answers.top}
    path, world = folder / "answers", current()
    if world.leads and files.kept(path, key) is None:
        # The teacher computes as it will in training without this: in the loop's autocast.
        device = next(teacher.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            asked = windows[:, :-1].to(device)
            write(path, of_model(teacher), asked, answers.top, key, progress)
    world.share(True)
    return LogitsCache(path, key), NumberedBatches(windows, settings)


def teacher_and_batches(
    answers: Answers | None, teacher: Any, context: StageContext
) -> tuple[Any | LogitsCache | None, Batches]:
    """Whom a stage's student learns from, and on what: the teacher as it is, or what it has said once."""
    batches = PackedBatches(context.tokens, context.settings)
    if answers is None:
        return teacher, batches
    return keep(answers, teacher, batches, context.settings, context.work, context.run.progress)
