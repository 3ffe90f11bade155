"""Training on some windows over and over, with a teacher's best answers to them on disk in place of the teacher."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.distill import logits_cache
from compress.distill.answers_recipe import Answers
from compress.distill.logits_cache import LogitsCache
from compress.distill.teacher import of_model
from compress.errors import UserError
from compress.training.batches import PackedBatches
from compress.training.parallel import World, alone, current
from compress.training.settings import Settings
from compress.training.task import Progress


class NumberedBatches:
    """The same windows in every epoch, each epoch in an order of its own; before a window stands its number.

    windows  (N, length + 1) int64.
    """

    def __init__(self, windows: Tensor, settings: Settings, world: World | None = None):
        self._windows, self._settings, self._world = windows, settings, world or alone()
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of micro-batch `micro` of a step: (B / processes, 1 + length + 1) int64."""
        settings, world = self._settings, self._world
        first = (step * settings.accumulate + micro) * settings.batch
        numbers = torch.tensor([self._number(first + row) for row in range(world.rank, settings.batch, world.size)])
        return torch.cat([numbers.unsqueeze(1), self._windows[numbers]], dim=1)

    def _number(self, index: int) -> int:
        epoch, place = divmod(index, len(self._windows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._settings.seed, epoch)).permutation(len(self._windows))
        return int(self._order[place])


def keep(
    answers: Answers, teacher: Any, batches: PackedBatches, settings: Settings, folder: Path, progress: Progress
) -> tuple[LogitsCache, NumberedBatches]:
    """Asks the teacher, a transformers model, once, and gives what it said with the batches that go with it.

    The windows are the first of `batches`. The file in `folder` is used again where it is of the same windows, as after
    a run that was killed; of several processes the first one writes it. Raises UserError for more windows than the text
    has, and where the teacher's vocabulary is no larger than `answers.top`.
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
    identity = {"windows": hashlib.sha256(windows.numpy().tobytes()).hexdigest(), "top": answers.top}
    path, world = folder / "answers", current()
    if world.leads and not _there(path, identity):
        # The teacher computes as it will in training without this: in the loop's autocast.
        device = next(teacher.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            asked = windows[:, :-1].to(device)
            logits_cache.write(path, of_model(teacher), asked, answers.top, identity, progress)
    world.share(True)
    return LogitsCache(path, identity), NumberedBatches(windows, settings, world)


def _there(path: Path, identity: dict[str, Any]) -> bool:
    try:
        LogitsCache(path, identity)
    except UserError:
        return False
    return True
