"""Batches from a stream of tokens: packed windows in a seeded order, each a pure function of the step."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.errors import UserError
from compress.training.parallel import World, alone
from compress.training.settings import Settings

# Tokens that an evaluation reads at once, as many as a micro-batch has by default. Logits take most of its memory.
AT_ONCE = 2048


def portions(windows: Tensor) -> tuple[Tensor, ...]:
    """Windows (E, length) in runs of AT_ONCE tokens at most, of one window at least."""
    return windows.split(max(1, AT_ONCE // windows.shape[1]))


class PackedBatches:
    """Windows of `length` + 1 tokens, cut from a stream one behind the other; every epoch has its own cut and order.

    tokens  1-D: a NumPy array of any integer type (it may be memory-mapped) or a tensor.
    name    what the text is called in errors.

    Two windows share one token: the last of one is only predicted, the first of the next only read. The rows of a
    micro-batch are dealt out to the processes in turn. Raises UserError for a stream shorter than one window.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer] | Tensor,
        settings: Settings,
        world: World | None = None,
        name: str = "the training text",
    ):
        self._tokens = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        self._settings, self._world = settings, world or alone()
        if self._tokens.ndim != 1:
            raise ValueError(f"expected a stream of tokens, found shape {self._tokens.shape}")
        length = settings.length
        if len(self._tokens) < length + 1:
            raise UserError(
                f"{name} is too short to train on: it has {len(self._tokens)} tokens, and one window needs "
                f"{length + 1}: name a longer text with training.source or shorten training.length"
            )
        windows = (len(self._tokens) - 1) // length
        # One window less gives every epoch a cut of its own.
        self.windows = max(windows - 1, 1)
        self._slack = len(self._tokens) - 1 - self.windows * length
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of micro-batch `micro` of a step: (B / processes, length + 1) int64."""
        settings, world = self._settings, self._world
        first = (step * settings.accumulate + micro) * settings.batch
        rows = [self.window(first + row) for row in range(world.rank, settings.batch, world.size)]
        return torch.from_numpy(np.stack(rows))

    def window(self, index: int) -> NDArray[np.int64]:
        """(length + 1,): the window at place `index` of all epochs one after the other."""
        epoch, place = divmod(index, self.windows)
        if epoch != self._epoch:
            chooser = np.random.default_rng((self._settings.seed, epoch))
            offset = int(chooser.integers(0, self._slack + 1))
            self._epoch = epoch
            self._starts = chooser.permutation(self.windows) * self._settings.length + offset
        start = int(self._starts[place])
        return self._tokens[start : start + self._settings.length + 1].astype(np.int64)
