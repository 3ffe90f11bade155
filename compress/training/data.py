"""Windows that choose the best weights of a training run: read by neither calibration, evaluation nor training.

What the measured text has left beside its calibration and evaluation windows is taken where training does not read it;
else a part of the training text is set aside.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calib.token_bytes import Ints
from calib.training_text import Measured, Stream, TrainingText, tokenize
from calib.training_text import gather as read
from compress.errors import UserError
from compress.progress import Progress
from compress.recipe import Recipe
from compress.recipe.training import Settings
from compress.training.parallel import World, current

# Tokens that an evaluation reads at once, as many as a micro-batch has by default. Logits take most of its memory.
AT_ONCE = 2048


def portions(windows: Tensor) -> tuple[Tensor, ...]:
    """Windows (E, length) in runs of AT_ONCE tokens at most, of one window at least."""
    return windows.split(max(1, AT_ONCE // windows.shape[1]))


def places(settings: Settings, world: World, step: int, micro: int) -> range:
    """Where this process's rows of a micro-batch stand among all windows of all epochs, one after the other."""
    first = (step * settings.gradient_accumulation_steps + micro) * settings.batch
    return range(first + world.rank, first + settings.batch, world.size)


class ShuffledNumbers:
    """Numbers of windows, the same ones in every epoch, each in an order of its own: for tasks that look them up."""

    def __init__(self, windows: int, settings: Settings, world: World | None = None) -> None:
        self._windows, self._settings, self._world = windows, settings, world or current()
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of micro-batch `micro` of a step: (B / processes, 1) int64."""
        return torch.tensor([[self._number(row)] for row in places(self._settings, self._world, step, micro)])

    def _number(self, index: int) -> int:
        epoch, place = divmod(index, self._windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._settings.seed, epoch)).permutation(self._windows)
        return int(self._order[place])


class PackedBatches:
    """Windows of `length` + 1 tokens, cut from a stream one behind the other; every epoch has its own cut and order.

    tokens  1-D: a NumPy array of any integer type (it may be memory-mapped) or a tensor.

    Two windows share one token: the last of one is only predicted, the first of the next only read. The rows of a
    micro-batch are dealt out to the processes in turn. Raises UserError for a stream shorter than one window.
    """

    def __init__(self, tokens: NDArray[np.integer] | Tensor, settings: Settings, world: World | None = None):
        self._tokens = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        self._settings, self._world = settings, world or current()
        if self._tokens.ndim != 1:
            raise ValueError(f"expected a stream of tokens, found shape {self._tokens.shape}")
        length = settings.length
        if len(self._tokens) < length + 1:
            raise UserError(
                f"the training text is too short to train on: it has {len(self._tokens)} tokens, and one window needs "
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
        return torch.from_numpy(
            np.stack([self.window(row) for row in places(self._settings, self._world, step, micro)])
        )

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


@dataclass(frozen=True)
class StageText:
    """One stage's text, not yet tokenised, and (E, length) int64 windows that choose its best weights."""

    text: TrainingText
    measured: Measured
    length: int
    held_out: Tensor

    def tokens(self, folder: Path, progress: Progress) -> Stream:
        """The stream, from a file in `folder`, where it is kept for a resumed run."""
        place = folder / f"text-{self.text.sha256[:12]}"
        return tokenize(
            self.text,
            self.measured.tokenizer,
            place,
            length=self.length,
            separator=self.measured.separator,
            progress=progress,
        )

    def report(self) -> dict[str, Any]:
        """What the report says of it."""
        about: dict[str, Any] = {"source": self.text.name, "sha256": self.text.sha256}
        about["held_out_tokens"] = self.held_out.numel()
        return about | {"documents": len(self.text.documents), "left_out": dict(self.text.left_out)}


def gather(recipe: Recipe, measured: Measured) -> dict[int, StageText]:
    """The text of every stage that trains, by its index in the recipe; one source is read once.

    Raises UserError for a source that is not there, and for one that leaves nothing to train on.
    """
    found: dict[str | None, tuple[TrainingText, Tensor]] = {}
    out = {}
    for index, stage in enumerate(recipe.stages):
        if (trained := stage.trained) is not None:
            source = trained.training.source
            if source not in found:
                found[source] = set_aside(read(source, measured), measured)
            text, held_out = found[source]
            out[index] = StageText(text, measured, trained.training.length, held_out)
    return out


WINDOWS = 16
_WINDOWS_PER_DOCUMENT = 2
# Of the training text at the most, where it has to give.
_SHARE = 0.1
_DOCUMENTS = 10
_CHARACTERS_PER_TOKEN = 32


def set_aside(text: TrainingText, measured: Measured) -> tuple[TrainingText, Tensor]:
    """The text without what is set aside of it, and (E, length) int64 windows, E at most 16.

    Raises UserError where there is not one window.
    """
    trained = set(text.documents)
    apart = [document for document in measured.windows.unread if document not in trained]
    windows = _windows(_encoded(apart, measured), measured.length)
    if len(windows) > 1:
        return text, windows
    kept, given = _split(text, measured)
    windows = _windows(given, measured.length)
    if not len(windows):
        raise UserError(
            f"{text.name} is too short to train on: not one window of {measured.length} tokens can be set aside to "
            "choose the best weights by: name a longer text, or ask for shorter windows with --seq-len"
        )
    digest = hashlib.sha256(f"{text.sha256} {hashlib.sha256(windows.numpy().tobytes()).hexdigest()}".encode())
    return replace(kept, sha256=digest.hexdigest()), windows


def _split(text: TrainingText, measured: Measured) -> tuple[TrainingText, Iterable[Ints]]:
    """What training keeps, and the tokens of what it gives: whole documents, or where it has few the end of one."""
    count = len(text.documents)
    if count >= _DOCUMENTS:
        order = random.Random(f"{measured.seed} held out").sample(range(count), max(1, int(count * _SHARE)))
        chosen = set(order[: WINDOWS // _WINDOWS_PER_DOCUMENT * 2])
        given = [text.documents[i] for i in order if i in chosen]
        kept = tuple(document for i, document in enumerate(text.documents) if i not in chosen)
        return replace(text, documents=kept), _encoded(given, measured)
    if text.runs:
        longest = max(range(len(text.runs)), key=lambda i: len(text.runs[i]))
        run = text.runs[longest]
        cut = len(run) - max(measured.length, int(len(run) * _SHARE))
        runs = (*text.runs[:longest], run[: max(cut, 0)], *text.runs[longest + 1 :])
        return replace(text, runs=tuple(run for run in runs if len(run))), [run[max(cut, 0) :]]
    longest = max(range(count), key=lambda i: len(text.documents[i]))
    document = text.documents[longest]
    cut = document.rfind("\n", 0, int(len(document) * (1 - _SHARE))) + 1 or int(len(document) * (1 - _SHARE))
    documents = (*text.documents[:longest], document[:cut], *text.documents[longest + 1 :])
    return replace(text, documents=documents), _encoded([document[cut:]], measured, WINDOWS)


def _encoded(documents: Sequence[str], measured: Measured, windows: int = _WINDOWS_PER_DOCUMENT) -> Iterable[Ints]:
    """The first tokens of each document, the separator before them: enough for so many windows."""
    most = windows * measured.length
    head = [] if measured.separator is None else [measured.separator]
    for document in documents:
        ids = measured.tokenizer(document[: most * _CHARACTERS_PER_TOKEN], add_special_tokens=False, verbose=False)
        yield np.array([*head, *ids["input_ids"]][:most], dtype=np.int64)


def _windows(pieces: Iterable[Ints], length: int) -> Tensor:
    found: list[Ints] = []
    total = 0
    for piece in pieces:
        found.append(piece)
        total += len(piece)
        if total >= WINDOWS * length:
            break
    count = min(total // length, WINDOWS)
    stream = np.concatenate([np.zeros(0, np.int64), *found])[: count * length]
    return torch.from_numpy(stream.reshape(count, length))
