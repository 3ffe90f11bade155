"""Windows of tokens: packed, seeded, and with calibration and evaluation kept apart."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from calib.corpora import Corpus
from calib.errors import UserError
from calib.token_bytes import Ints, encode_with_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Evaluation is spread: it reads on in other documents until two windows of each would be enough, …
_WINDOWS_PER_DOCUMENT = 2
# … takes a document that is more than this part of the text only where no others are left, …
_LARGE_SHARE = 1 / 8
# … and leaves calibration half of the text. None of this looks at calibration's wishes, so that every recipe is
# evaluated on the same windows.
_EVALUATION_SHARE = 1 / 2
# Windows that are drawn beside each of evaluation's, of the same documents.
_FURTHER = 4
# A document is read no further than a part could use: hardly any tokenizer takes more characters for a token.
_CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True, eq=False)
class Windows:
    """Tokens to calibrate and to evaluate on.

    calibration       (S, length) int64.
    evaluation        (E, length) int64; every token but a window's first is predicted.
    evaluation_bytes  (E,) int64: UTF-8 bytes of the text that the window's predicted tokens stand for. A separator
                      stands for none.
    evaluation_documents  (E,) int64: which document each evaluation window is of; empty: not known.
    further           (F, length) int64: more windows of evaluation's documents, at most four for each of evaluation's,
                      which neither part holds; further_documents (F,) as above.
    unread, runs      what is left for training: the texts that neither part read, and the runs of tokens (separators
                      included) of calibration's part that lie outside of its windows. Documents that evaluation takes
                      windows from are left out whole.
    """

    calibration: Tensor
    evaluation: Tensor
    evaluation_bytes: Tensor
    unread: tuple[str, ...] = ()
    runs: tuple[Ints, ...] = ()
    evaluation_documents: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    further: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    further_documents: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return self.evaluation.shape[1]


def make_windows(
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    length: int,
    calibration: int,
    evaluation_tokens: int,
    seed: int,
    separator: int | None = None,
) -> Windows:
    """`calibration` windows and `evaluation_tokens` // `length` evaluation windows of `length` tokens.

    Each part packs its own documents, with the separator before each, and cuts them into windows that do not overlap;
    which windows are taken is drawn by `seed`, a document at a time, so that a long one does not crowd out the others.
    A text of one document (or too short otherwise) is cut in two: calibration before, evaluation after. Half of the
    text at least is left to calibration whether or not it is asked for, so the evaluation windows depend on the
    corpus, the tokenizer, `length`, `evaluation_tokens` and `seed` only. Either part may be asked for 0 windows.

    Where the text has fewer windows than asked for, there are as many as it gives. Raises UserError where it has not
    one of each that was asked for.
    """
    if length < 2:
        raise UserError(f"expected windows of at least 2 tokens, found {length}: ask for longer ones")
    if calibration < 0 or evaluation_tokens < 0:
        raise UserError(
            f"expected 0 or more calibration windows and evaluation tokens, found {calibration} and "
            f"{evaluation_tokens}: correct them"
        )
    if 0 < evaluation_tokens < length:
        raise UserError(
            f"expected at least one window of {length} evaluation tokens, found {evaluation_tokens}: "
            "ask for more tokens or for shorter windows"
        )
    packer = _Packer(tokenizer, length, separator)
    wanted = evaluation_tokens // length
    before, after, unread = _split(corpus, packer, calibration, wanted, seed)
    for part, asked, what in ((before, calibration, "calibration"), (after, wanted, "evaluation")):
        if asked and not part.windows:
            total = len(before.tokens) + len(after.tokens)
            raise UserError(
                f"{corpus.name} is too short: of its {total} tokens the part for {what} has {len(part.tokens)}, and "
                f"one window needs {packer.body}: name a longer text or ask for shorter windows"
            )
    calibration_starts = packer.starts(before, calibration, random.Random(f"{seed} calibration"))
    calibration_windows, _ = packer.cut(before, calibration_starts)
    starts = packer.starts(after, wanted * (1 + _FURTHER), random.Random(f"{seed} evaluation"))
    documents = packer.documents(after, starts)
    evaluation_windows, evaluation_bytes = packer.cut(after, starts[:wanted])
    further, _ = packer.cut(after, starts[wanted:])
    taken = np.zeros(len(before.tokens), dtype=bool)
    for start in calibration_starts:
        taken[start : start + packer.body] = True
    runs = np.split(before.tokens, np.flatnonzero(np.diff(taken)) + 1)
    # Runs that were taken and runs that were not take turns.
    left = tuple(run for run in runs[int(taken[:1].any()) :: 2] if len(run))
    return Windows(
        calibration_windows,
        evaluation_windows,
        evaluation_bytes,
        tuple(unread),
        left,
        documents[:wanted],
        further,
        documents[wanted:],
    )


@dataclass(frozen=True)
class _Packed:
    """One part's stream: token ids, the bytes each stands for, the document each belongs to; and its whole windows."""

    tokens: Ints
    bytes: Ints
    document: Ints
    windows: int


class _Packer:
    """Encodes documents into one stream and draws windows of it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", length: int, separator: int | None):
        self.tokenizer, self.length, self.separator = tokenizer, length, separator
        self.start = start_token(tokenizer)
        self.body = length - (self.start is not None)  # text tokens in a window
        self.cache: dict[str, tuple[Ints, Ints]] = {}

    def encode(self, text: str) -> tuple[Ints, Ints]:
        """Token ids, the separator included, and the bytes that each stands for. Keeps what it has encoded."""
        if text not in self.cache:
            ids, sizes = encode_with_bytes(self.tokenizer, text)
            if self.separator is not None:
                ids, sizes = np.concatenate([[self.separator], ids]), np.concatenate([[0], sizes])
            self.cache[text] = ids, sizes
        return self.cache[text]

    def pack(self, texts: Sequence[str]) -> _Packed:
        """The stream of `texts` in their order."""
        empty = np.zeros(0, np.int64)
        encoded = [self.encode(text) for text in texts]
        tokens = np.concatenate([empty, *(ids for ids, _ in encoded)])
        sizes = np.concatenate([empty, *(sizes for _, sizes in encoded)])
        document = np.repeat(np.arange(len(encoded)), np.array([len(ids) for ids, _ in encoded], np.int64))
        return _Packed(tokens, sizes, document, len(tokens) // self.body)

    def cut(self, part: _Packed, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The windows that begin there, and the bytes of their predicted tokens."""
        head = [] if self.start is None else [self.start]
        first_predicted = 1 if self.start is None else 0
        rows = [[*head, *part.tokens[s : s + self.body].tolist()] for s in starts]
        sizes = [int(part.bytes[s + first_predicted : s + self.body].sum()) for s in starts]
        windows = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.length)
        return windows, torch.tensor(sizes, dtype=torch.int64)

    def documents(self, part: _Packed, starts: Sequence[int]) -> Tensor:
        """The document (n,) of each of the windows that begin there: that of its middle token."""
        return torch.from_numpy(part.document[np.array(starts, np.int64) + self.body // 2])

    def starts(self, part: _Packed, count: int, chooser: random.Random) -> list[int]:
        """Where at most `count` windows begin in the part's stream, one document after the other in turn.

        A window belongs to the document of its middle token. The stream is cut from a random offset on.
        """
        offset = chooser.randint(0, len(part.tokens) - part.windows * self.body) if part.windows else 0
        owners: dict[int, list[int]] = {}
        for window in range(part.windows):
            start = offset + window * self.body
            owners.setdefault(int(part.document[start + self.body // 2]), []).append(start)
        queues = list(owners.values())
        chooser.shuffle(queues)
        for queue in queues:
            chooser.shuffle(queue)
        turns = max(map(len, queues), default=0)
        return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)][:count]


def _split(
    corpus: Corpus, packer: _Packer, calibration: int, evaluation: int, seed: int
) -> tuple[_Packed, _Packed, list[str]]:
    """Calibration's part, evaluation's, and the texts that neither reads."""
    order = list(range(len(corpus.documents)))
    random.Random(seed).shuffle(order)
    texts = [corpus.documents[i] for i in order]
    before, after, unread = _split_by_document(texts, packer, calibration, evaluation)
    # Whether calibration is asked for now does not count: another recipe, evaluated on the same windows, may ask.
    if before.windows and (evaluation == 0 or after.windows):
        return before, after, unread
    return _split_by_position(corpus.documents, packer, calibration, evaluation)


def _split_by_document(
    texts: Sequence[str], packer: _Packer, calibration: int, evaluation: int
) -> tuple[_Packed, _Packed, list[str]]:
    """Evaluation takes what it needs of the shuffled texts, calibration what it needs of the others."""
    total = sum(map(len, texts))
    # Stable: the shuffled order stays within the ordinary and within the large documents.
    candidates = sorted(range(len(texts)), key=lambda i: len(texts[i]) > _LARGE_SHARE * total)
    chosen = _gather(texts, candidates, packer, evaluation, total * _EVALUATION_SHARE)
    others = [i for i in range(len(texts)) if i not in set(chosen)]
    rest = _gather(texts, others, packer, max(calibration, 1), total)
    before, after = _clipper(packer, max(calibration, 1)), _clipper(packer, evaluation)
    read = {*chosen, *rest}
    unread = [text for i, text in enumerate(texts) if i not in read]
    unread += [tail for i in rest if (tail := texts[i][len(before(texts[i])) :])]
    return packer.pack([before(texts[i]) for i in rest]), packer.pack([after(texts[i]) for i in chosen]), unread


def _gather(
    texts: Sequence[str], candidates: Sequence[int], packer: _Packer, windows: int, characters: float
) -> list[int]:
    """Indices of the candidates to take for `windows` windows, in order, within a budget of characters.

    A document counts for two windows at most, however long it is: enough of them means that many are drawn from.
    """
    clip = _clipper(packer, windows)
    # One window more than asked: the stream is cut from a random offset on.
    needed = (windows + 1) * packer.body if windows else 0
    counted, read, taken = 0, 0, list[int]()
    for i in candidates:
        if counted >= needed:
            break
        if read + len(texts[i]) > characters:
            continue
        taken.append(i)
        read += len(texts[i])
        counted += min(len(packer.encode(clip(texts[i]))[0]), _WINDOWS_PER_DOCUMENT * packer.body)
    return taken


def _split_by_position(
    texts: Sequence[str], packer: _Packer, calibration: int, evaluation: int
) -> tuple[_Packed, _Packed, list[str]]:
    """The text in its order, cut in two at a line's end: calibration's part, then evaluation's (half at most)."""
    total = sum(map(len, texts))
    usable = _CHARACTERS_PER_TOKEN * (evaluation + 1) * packer.body if evaluation else 0
    left = total - int(min(total * _EVALUATION_SHARE, usable))
    clip = _clipper(packer, calibration)
    before, after, unread = list[str](), list[str](), list[str]()
    for text in texts:
        cut = min(left, len(text))
        if 0 < cut < len(text):
            cut = text.rfind("\n", 0, cut) + 1 or cut
        left = left - cut if cut == len(text) else 0
        kept = clip(text[:cut])
        before += [kept] if cut else []
        unread += [text[len(kept) : cut]] if len(kept) < cut else []
        after += [text[cut:]] if cut < len(text) else []
    return packer.pack(before), packer.pack(after), unread


def _clipper(packer: _Packer, windows: int) -> Callable[[str], str]:
    limit = _CHARACTERS_PER_TOKEN * (windows + 1) * packer.body
    return lambda text: text[:limit]


def start_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token id that the tokenizer puts before every text (Llama's and Gemma's <bos>), or None."""
    ids = tokenizer("", verbose=False)["input_ids"]
    first = ids[0] if len(ids) else None
    return int(first) if first is not None and first == tokenizer.bos_token_id else None
