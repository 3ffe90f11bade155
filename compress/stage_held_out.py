"""Windows that choose the best weights of a training run: read by neither calibration, evaluation nor training.

What the measured text has left beside its calibration and evaluation windows is taken where training does not read it;
else a part of the training text is set aside.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compress.errors import UserError

if TYPE_CHECKING:
    from calib.token_bytes import Ints
    from calib.training_text import Measured, TrainingText

WINDOWS = 16
_WINDOWS_PER_DOCUMENT = 2
# Of the training text at the most, where it has to give.
_SHARE = 0.1
_DOCUMENTS = 10
_CHARACTERS_PER_TOKEN = 32


def set_aside(text: "TrainingText", measured: "Measured") -> "tuple[TrainingText, Tensor]":
    """The text without what is set aside of it, and (E, length) int64 windows, E at most 16.

    Raises UserError where there is not one window.
    """
    from calib.windows import remainder

    unread, _ = remainder(
        measured.corpus,
        measured.tokenizer,
        length=measured.length,
        calibration=measured.calibration,
        evaluation_tokens=measured.evaluation_tokens,
        seed=measured.seed,
        separator=measured.separator,
    )
    trained = set(text.documents)
    apart = [document for document in unread if document not in trained]
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


def _split(text: "TrainingText", measured: "Measured") -> "tuple[TrainingText, Iterable[Ints]]":
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


def _encoded(documents: Sequence[str], measured: "Measured", windows: int = _WINDOWS_PER_DOCUMENT) -> "Iterable[Ints]":
    """The first tokens of each document, the separator before them: enough for so many windows."""
    most = windows * measured.length
    head = [] if measured.separator is None else [measured.separator]
    for document in documents:
        ids = measured.tokenizer(document[: most * _CHARACTERS_PER_TOKEN], add_special_tokens=False, verbose=False)
        yield np.array([*head, *ids["input_ids"]][:most], dtype=np.int64)


def _windows(pieces: "Iterable[Ints]", length: int) -> Tensor:
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
