"""The change of loss from one model to the other on the same text, with an error that knows of the text's parts.

Tokens of one document are hard or easy together, so that documents count and not tokens: the error of the mean is that
of sums over blocks (Liang and Zeger, 1986), with Student's t of as many degrees of freedom as there are blocks, less
one. A block is a document; where the text has few of them, a window.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.quality.statistics import Floats

_LEAST_DOCUMENTS = 10


@dataclass(frozen=True)
class PairedLosses:
    """compressed − original in nats a token: the mean, its error, the blocks that it is from, and the tokens."""

    mean: float
    error: float
    blocks: int
    unit: Literal["document", "window"]
    tokens: int


def paired(differences: Floats, documents: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: int) -> PairedLosses:
    """Of the mean differences (n,) of windows of equal length, with `tokens` predicted in all.

    documents  (n,): which document each window is of; empty: not known. Raises ValueError for fewer than two windows.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"an error of paired losses needs at least 2 windows, found {count}")
    known = len(documents) == count and len(np.unique(documents)) >= _LEAST_DOCUMENTS
    names = np.unique(documents, return_inverse=True)[1] if known else np.arange(count)
    blocks = int(names.max()) + 1
    mean = float(differences.mean())
    sums = np.bincount(names, weights=differences - mean)
    error = math.sqrt(blocks / (blocks - 1) * float((sums**2).sum())) / count
    return PairedLosses(mean, error, blocks, "document" if known else "window", tokens)
