"""How many bytes of text each token stands for, so that a loss per token can be told per byte."""

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def encode_with_bytes(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[Ints, Ints]:
    """Token ids of `text`, nothing added, and how many of its UTF-8 bytes each token stands for, (n,) int64 both.

    The bytes add up to those of the text. A token stands for everything between the end of the one before it and its
    own end, so text that the tokenizer drops belongs to what follows it (at the end, to the last token). Tokens that
    share characters (byte-level pieces of one character) share their bytes evenly.
    """
    fast = tokenizer.is_fast
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not len(ids):
        return ids, ids
    at = _byte_positions(text)
    if not fast:
        return ids, np.diff(np.arange(len(ids) + 1) * at[-1] // len(ids))
    spans = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    ends = at[np.maximum.accumulate(spans[:, 1])]
    ends[-1] = at[-1]
    sizes = np.diff(ends, prepend=0)
    if not text.isascii():
        # Tokens with the same span share its bytes.
        new = np.any(spans[1:] != spans[:-1], axis=1)
        starts = np.concatenate([[0], np.flatnonzero(new) + 1, [len(spans)]])
        for first, last in itertools.pairwise(starts.tolist()):
            if last - first > 1:
                run = sizes[first:last]
                run[:] = np.diff(np.arange(len(run) + 1) * run.sum() // len(run))
    return ids, sizes


def _byte_positions(text: str) -> Ints:
    """Offset in UTF-8 of each character of `text`, and of its end: (characters + 1,)."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(widths)])
